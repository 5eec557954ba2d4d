-- Two questions, one after the other: only what passes the filter in WHERE reaches llm_extract. The cheap condition on
-- the rating comes before both, so the filter is asked about the tickets with a rating of 1 alone.
-- The fields have DuckDB types, and the model can only write JSON of these types. A field is NULL where the text does
-- not say it.
{{ config(materialized='table') }}

with asked as (

    select
        ticket_id,
        customer,
        body,
        llm_extract(
            body,
            '{"about": "VARCHAR(40)", "days_waited": "SMALLINT", "amount": "DECIMAL(9,2)"}'
        ) as facts
    from {{ ref('stg_tickets') }}
    where
        rating = 1
        and llm_filter(body, 'Is the customer angry?')

)

select
    ticket_id,
    customer,
    body,
    facts,
    facts.about as about,
    facts.days_waited as days_waited,
    facts.amount as amount
from asked
