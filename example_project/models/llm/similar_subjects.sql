-- The nearest other subject of each, by the angle between their embeddings. Embeddings come from an LLM entry of its
-- own: in profiles.yml, `embedder` is the same model, run to embed instead of to write.
{{ config(materialized='table') }}

with embedded as (

    select
        subject,
        llm_embed(subject, model := 'embedder') as vector
    from (select distinct subject from {{ ref('stg_tickets') }})

)

select
    one.subject,
    arg_max(other.subject, list_cosine_similarity(one.vector, other.vector)) as nearest_subject,
    round(max(list_cosine_similarity(one.vector, other.vector)), 3) as similarity
from embedded as one
inner join embedded as other on one.subject <> other.subject
group by one.subject
