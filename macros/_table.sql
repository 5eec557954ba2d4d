{# What reads a table of the store: a subquery. While dbt parses, nothing is opened. #}
{% macro _table(name) -%}
  {%- if not execute -%}
    {{ return('(select 1)') }}
  {%- endif -%}
  {%- do run_query('select 1') -%}
  {%- set request = {'package_version': dbt_llm._version(), 'table': name} -%}
  {%- do adapter.store_relation('dbt_llm', none, [], '', 'relation', request) -%}
  {{ return(request['relation']) }}
{%- endmacro %}
