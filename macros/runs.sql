{#
  The run log, to be queried: `select * from {{ dbt_llm.runs() }}`. A row stands for one node and
  run; `run_id` is that of the generations which it made. A run that was killed has the status
  `unfinished`, and what its answers tell.
#}
{% macro runs() -%}
  {{ return(dbt_llm._table('runs')) }}
{%- endmacro %}
