-- One topic per distinct subject, not per ticket: the query groups first, so it needs one answer per group.
-- With `choices` the model can only answer with one of them.
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
    llm_generate(
        'Text: ' || subject,
        system := 'Classify the text as one of: shipping, refund, login, payment, product, website.',
        choices := ['shipping', 'refund', 'login', 'payment', 'product', 'website'],
        max_tokens := 6
    ) as topic
from subjects
