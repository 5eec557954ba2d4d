{#
  The stored answers, to be queried: `select * from {{ dbt_llm.generations() }}`.

  It reads the state at the time when the query is compiled. A model that queries the answers of
  others says so, so that dbt builds it after them: `-- depends_on: {{ ref('tickets') }}`.
#}
{% macro generations() -%}
  {{ return(dbt_llm._table('generations')) }}
{%- endmacro %}
