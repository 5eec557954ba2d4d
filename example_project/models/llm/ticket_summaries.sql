-- One sentence per ticket. People send the same text more than once: equal prompts are asked once.
-- llm_details gives what llm_generate gives and, beside the output, what happened. One ticket is longer than the
-- model's context: its row stays, with the status 'error' and the code 'context_length'.
{{ config(materialized='table') }}

with asked as (

    select
        ticket_id,
        created_at,
        channel,
        body,
        llm_details(
            'Summarise this support ticket in one short sentence: ' || body,
            max_tokens := 24
        ) as answer
    from {{ ref('stg_tickets') }}

)

select
    ticket_id,
    created_at,
    channel,
    body,
    answer.output as summary,
    answer.status as status,
    answer.error_code as error_code,
    answer.completion_tokens as completion_tokens,
    answer.prompt_hash as prompt_hash
from asked
