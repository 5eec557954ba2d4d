{#
  Refuses a view whose query calls LLM functions: they exist only in dbt's own connections, so
  nobody else could read the view. All other views are created by dbt-duckdb's own macro. The
  failures of the test llm_judge become a table in place of a view.
#}
{% macro duckdb__create_view_as(relation, sql) -%}
  {%- if execute and dbt_llm._asks() -%}
    {{ return(dbt_llm.duckdb__create_table_as(false, relation, sql)) }}
  {%- elif execute -%}
    {%- call statement('dbt_llm_begin') -%} select 1 {%- endcall -%}
    {%- set request = {
      'node_id': model.unique_id,
      'package_version': dbt_llm._version(),
      'query': sql,
      'header': config.get('sql_header') or '',
    } -%}
    {%- do adapter.store_relation('dbt_llm', relation, [], '', 'check_view', request) -%}
  {%- endif -%}
  {{ return(dbt.duckdb__create_view_as(relation, sql)) }}
{%- endmacro %}
