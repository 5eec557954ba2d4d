-- Counts per channel and topic. It only reads the three LLM models, so nothing is asked here.
-- A Delta table, of which each run writes what is different, and removes what is gone.
{{ config(materialized='lakehouse', unique_key=['channel', 'topic'], incremental_strategy='overwrite') }}

with tickets as (

    select
        ticket_id,
        channel,
        subject,
        rating
    from {{ ref('stg_tickets') }}

)

select
    tickets.channel,
    topics.topic,
    count(*) as tickets,
    count(*) filter (summaries.status = 'ok') as answered,
    count(*) filter (summaries.status = 'error') as errors,
    count(replies.reply) as drafted_replies,
    coalesce(sum(summaries.completion_tokens), 0)::bigint as summary_tokens,
    round(avg(tickets.rating), 1) as average_rating
from tickets
left join {{ ref('ticket_topics') }} as topics using (subject)
left join {{ ref('ticket_summaries') }} as summaries using (ticket_id)
left join {{ ref('ticket_replies') }} as replies using (ticket_id)
group by tickets.channel, topics.topic
order by tickets desc, channel, topic
