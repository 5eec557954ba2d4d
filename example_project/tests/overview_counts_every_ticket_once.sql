with counts as (
    select
        (select count(*) from {{ ref('stg_tickets') }}) as staged,
        (select count(*) from {{ ref('ticket_summaries') }}) as summarised,
        (select coalesce(sum(tickets), 0) from {{ ref('ticket_overview') }}) as in_overview
)

select *
from counts
where staged is distinct from summarised or staged is distinct from in_overview
