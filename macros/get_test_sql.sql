{#
  Lets the test llm_judge ask what it lacks: its failing rows become a temporary table, built like
  that of a model. dbt drops it with the connection. All other tests are left to dbt.

  dbt calls this by the same `dispatch` block as create_table_as.
#}
{% macro duckdb__get_test_sql(main_sql, fail_calc, warn_if, error_if, limit) -%}
  {#- Stored failures are in a table by now. -#}
  {%- if execute and dbt_llm._asks() and not should_store_failures() -%}
    {%- set failing = make_temp_relation(this) -%}
    {%- call statement('dbt_llm_judge') -%}
      {{ dbt_llm.duckdb__create_table_as(true, failing, main_sql) }}
    {%- endcall -%}
    {%- set main_sql = 'select * from ' ~ failing.include(database=false, schema=false) -%}
  {%- endif -%}
  {{ return(dbt.default__get_test_sql(main_sql, fail_calc, warn_if, error_if, limit)) }}
{%- endmacro %}
