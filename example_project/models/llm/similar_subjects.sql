-- For each subject the other one that is most like it, by the angle between their embeddings.
-- Embeddings come from an LLM entry of their own: `embedder` in profiles.yml.
-- This model writes its call with the Jinja wrapper, which does the same as llm_embed(subject, model := 'embedder').
{{ config(materialized='table') }}

with embedded as (

    select
        subject,
        {{ dbt_llm.llm_embed('subject', model='embedder') }} as vector
    from (select distinct subject from {{ ref('stg_tickets') }})

)

select
    one.subject,
    arg_max(other.subject, list_cosine_similarity(one.vector, other.vector)) as most_similar,
    round(max(list_cosine_similarity(one.vector, other.vector)), 3) as similarity
from embedded as one
inner join embedded as other on one.subject <> other.subject
group by one.subject
