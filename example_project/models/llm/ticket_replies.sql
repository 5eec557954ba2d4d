-- A first draft of a reply for every unhappy customer. The model is incremental: a later run reads the newer tickets
-- only. `dbt build --full-refresh` rebuilds the table from the stored answers and asks nothing.
-- prompt_hash is the key of the answer in the store, lake/llm/generations, which any Delta reader opens.
{{ config(materialized='incremental', unique_key='ticket_id') }}

{% set system = 'You are a friendly support agent of an online shop. Write a short reply to the customer.' %}

select
    ticket_id,
    created_at,
    customer,
    llm_generate(body, system := '{{ system }}', max_tokens := 32) as reply,
    llm_prompt_hash(body, system := '{{ system }}', max_tokens := 32) as prompt_hash
from {{ ref('stg_tickets') }}
where rating <= 2

{% if is_incremental() %}
  and created_at > (select coalesce(max(created_at), timestamp '1970-01-01') from {{ this }})
{% endif %}
