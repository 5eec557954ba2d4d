-- One topic per distinct subject, not per ticket: the query groups first, so it needs one answer per group.
-- The model can only answer with one of the labels.
-- The table is a Parquet file that other tools can read.
{{ config(materialized='external', location='lake/ticket_topics_' ~ target.name ~ '.parquet', format='parquet') }}

with subjects as (

    select
        subject,
        count(*) as tickets
    from {{ ref('stg_tickets') }}
    group by subject

)

select
    subject,
    tickets,
    llm_classify(
        subject,
        ['shipping', 'refund', 'login', 'payment', 'product', 'website'],
        instruction := 'What is this message to an online shop about?'
    ) as topic
from subjects
