-- The summaries as a Delta table for other engines: one row for each text, keyed by the prompt hash.
-- A run with new tickets adds their rows to the table and leaves the others alone; a run without makes no new version.
{{ config(materialized='lakehouse', unique_key='prompt_hash') }}

with texts as (

    select
        body,
        any_value(summary) as summary,
        any_value(error_code) as error_code,
        count(*) as tickets
    from {{ ref('ticket_summaries') }}
    where body is not null
    group by body

)

select
    llm_prompt_hash(
        'Summarise this support ticket in one short sentence: ' || body,
        max_tokens := 24
    ) as prompt_hash,
    body,
    summary,
    error_code,
    tickets
from texts
