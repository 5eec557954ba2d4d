{#
  Writes the stored answers to a JSON-lines file, which a profile's `replay` engine can serve
  (its key `answers`): so a CI without a key or a network builds the project with real answers.

      dbt run-operation dbt_llm.record --args '{path: answers.jsonl}'

  A relative path is seen from the folder in which dbt runs.
#}
{% macro record(path) -%}
  {%- if execute -%}
    {%- do run_query('select 1') -%}
    {%- set request = {'package_version': dbt_llm._version(), 'path': path} -%}
    {%- do adapter.store_relation('dbt_llm', none, [], '', 'record', request) -%}
  {%- endif -%}
{%- endmacro %}
