{#
  Like dbt's is_incremental(), and true in a model of the materialization lakehouse as well, when
  its table and the view of it are there and --full-refresh is not given.

  dbt's own asks for a table of the materialization incremental, and only a macro of the user's
  project comes before it. `dbt-llm init` writes it:

      {% macro is_incremental() %}{{ return(dbt_llm.is_incremental()) }}{% endmacro %}
#}
{% macro is_incremental() -%}
  {%- if not execute or model.config.materialized != 'lakehouse' -%}
    {{ return(dbt.is_incremental()) }}
  {%- endif -%}
  {%- set relation = adapter.get_relation(this.database, this.schema, this.table) -%}
  {%- if relation is none or relation.type != 'view' or should_full_refresh() -%}
    {{ return(false) }}
  {%- endif -%}
  {%- set request = dbt_llm._lakehouse_request() -%}
  {%- do adapter.store_relation('dbt_llm', relation, [], '', 'lakehouse_exists', request) -%}
  {{ return(request['exists']) }}
{%- endmacro %}
