{#
  Materializes a model as a Delta or Parquet table that other engines read, with a view over it.

      {{ config(materialized='lakehouse', unique_key='id') }}

  The query's rows become a temporary table, by the same macro as those of a table, so LLM calls are
  answered and contracts are checked. The plugin writes them; docs/lakehouse.md says how.
#}
{% materialization lakehouse, adapter="duckdb", supported_languages=['sql', 'python'] %}
  {%- set language = model['language'] -%}
  {%- set target_relation = this.incorporate(type='view') -%}
  {%- set existing_relation = load_cached_relation(this) -%}
  {%- set is_incremental_run = dbt_llm.is_incremental() -%}
  {%- set intermediate_relation = make_intermediate_relation(target_relation, suffix='__dbt_int') -%}
  {%- set backup_type = 'view' if existing_relation is none else existing_relation.type -%}
  {%- set backup_relation = make_backup_relation(target_relation, backup_type) -%}
  {%- set grant_config = config.get('grants') -%}

  {%- set comments = {} -%}
  {%- if config.persist_column_docs() -%}
    {%- for column in model.columns.values() if column.description -%}
      {%- do comments.update({column.name: column.description}) -%}
    {%- endfor -%}
  {%- endif -%}
  {%- set request = dbt_llm._lakehouse_request() -%}
  {%- do request.update({
    'is_incremental': is_incremental_run,
    'full_refresh': should_full_refresh(),
    'macros': model.depends_on.macros,
    'description': model.description if config.persist_relation_docs() else none,
    'comments': comments,
  }) -%}
  {#- A wrong config is told before anything is asked. -#}
  {%- do adapter.store_relation('dbt_llm', target_relation, [], '', 'check_lakehouse', request) -%}

  {#- A Python model, and a constraint of a contract, need a real table. -#}
  {%- set temporary = language == 'sql' and not enforced_constraint_types() -%}
  {%- if temporary -%}
    {%- set rows = make_temp_relation(this.incorporate(type='table')) -%}
  {%- else -%}
    {%- set rows = make_intermediate_relation(this.incorporate(type='table'), suffix='__dbt_tmp') -%}
    {{ drop_relation_if_exists(load_cached_relation(rows)) }}
  {%- endif -%}
  {{ drop_relation_if_exists(load_cached_relation(intermediate_relation)) }}
  {{ drop_relation_if_exists(load_cached_relation(backup_relation)) }}

  {{ run_hooks(pre_hooks, inside_transaction=False) }}
  {{ run_hooks(pre_hooks, inside_transaction=True) }}

  {% call statement('create_rows', language=language) -%}
    {{- create_table_as(temporary, rows, compiled_code, language) }}
  {%- endcall %}

  {%- set name_of_rows = rows.include(database=(not temporary), schema=(not temporary)) -%}
  {%- do request.update({'rows': name_of_rows | string}) -%}
  {%- do adapter.store_relation('dbt_llm', target_relation, [], '', 'lakehouse', request) -%}

  {% call statement('main') -%}
    create or replace view {{ intermediate_relation }} as ({{ request['select'] }})
  {%- endcall %}
  {%- if existing_relation is not none -%}
    {%- if existing_relation.is_table -%}
      {%- do drop_indexes_on_relation(existing_relation) -%}
    {%- endif -%}
    {{ adapter.rename_relation(existing_relation, backup_relation) }}
  {%- endif -%}
  {{ adapter.rename_relation(intermediate_relation, target_relation) }}

  {% set should_revoke = should_revoke(existing_relation, full_refresh_mode=True) %}
  {% do apply_grants(target_relation, grant_config, should_revoke=should_revoke) %}
  {% do persist_docs(target_relation, model) %}

  {{ run_hooks(post_hooks, inside_transaction=True) }}
  {{ adapter.commit() }}
  {{ drop_relation_if_exists(backup_relation) }}
  {%- if temporary -%}
    {% call statement('drop_rows', auto_begin=False) -%} drop table if exists {{ name_of_rows }} {%- endcall %}
  {%- else -%}
    {{ drop_relation_if_exists(rows) }}
  {%- endif -%}
  {{ run_hooks(post_hooks, inside_transaction=False) }}

  {{ return({'relations': [target_relation]}) }}
{% endmaterialization %}
