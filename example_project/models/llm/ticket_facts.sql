-- Typed columns for the unhappiest customers: a BOOLEAN from a question, and a STRUCT with the fields that are named.
-- A field is NULL where the text does not say it.
{{ config(materialized='table') }}

select
    ticket_id,
    llm_filter(body, 'Does the customer want money back?') as wants_refund,
    llm_extract(body, '{"product":"VARCHAR(30)","days_waited":"SMALLINT"}', max_tokens := 48) as facts
from {{ ref('stg_tickets') }}
where rating = 1
