{#
  Builds a table whose query may call LLM functions.

  dbt calls this in place of its own macro where the project's dbt_project.yml says so:

      dispatch:
        - macro_namespace: dbt
          search_order: ['my_project', 'dbt_llm', 'dbt']

  The statement is dbt-duckdb's own. The plugin runs it, and what it needs from an LLM, until
  nothing is missing; a query without LLM functions is left to dbt as it is.
#}
{% macro duckdb__create_table_as(temporary, relation, compiled_code, language='sql', partitioned_by=none, sorted_by=none) -%}
  {%- set build_sql = dbt.duckdb__create_table_as(temporary, relation, compiled_code, language, partitioned_by, sorted_by) -%}
  {%- if language == 'sql' and execute and model.resource_type != 'unit_test' -%}
    {%- set columns = none -%}
    {#- A lakehouse table is checked by its writer, since its first run is temporary, too. -#}
    {%- set has_table = config.get('materialized') != 'lakehouse' or dbt_llm.is_incremental() -%}
    {%- if temporary and has_table and config.get('on_schema_change') == 'fail' -%}
      {%- set columns = adapter.get_columns_in_relation(this) | map(attribute='name') | list -%}
    {%- endif -%}
    {#- dbt adds a test's `limit` to its SQL: one on the failing rows, while all values are judged. -#}
    {%- set asks = dbt_llm._asks() -%}
    {%- set reads = model.resource_type == 'test' and not asks -%}
    {#- Opens dbt's transaction (and the connection), so that the plugin's statements are in it. -#}
    {%- call statement('dbt_llm_begin', auto_begin=not (partitioned_by or sorted_by)) -%} select 1 {%- endcall -%}
    {%- set request = {
      'node_id': model.unique_id,
      'invocation_id': invocation_id,
      'package_version': dbt_llm._version(),
      'query': sql if asks else compiled_code,
      'statement': build_sql,
      'table': relation.include(database=(not temporary), schema=(not temporary)) | string,
      'header': config.get('sql_header') or '',
      'columns': columns,
      'mode': 'null' if flags.EMPTY else ('cached' if reads else var('llm_mode', 'generate')),
      'refresh': var('llm_refresh', false),
      'limit': var('llm_limit', none),
      'max_cost_usd': var('llm_max_cost_usd', none),
    } -%}
    {%- do adapter.store_relation('dbt_llm', relation, [], '', 'resolve', request) -%}
    {%- set build_sql = request['statement'] -%}
  {%- endif -%}
  {{ return(build_sql) }}
{%- endmacro %}
