-- A blank body becomes NULL. An LLM function gives NULL for a NULL prompt, and asks nothing.
select
    ticket_id::integer as ticket_id,
    created_at::timestamp as created_at,
    trim(customer) as customer,
    lower(trim(channel)) as channel,
    trim(subject) as subject,
    nullif(trim(body, e' \t\r\n'), '') as body,
    rating::integer as rating
from {{ ref('tickets') }}
