-- A ticket with text has an answer or an error, and a ticket without text has neither.
select ticket_id, body, status
from {{ ref('ticket_summaries') }}
where (body is null) is distinct from (status is null)
