{# Whether the node at hand is a test that asks: llm_judge does, all others read what is stored. #}
{% macro _asks() -%}
  {%- set test = model.get('test_metadata') or {} -%}
  {{ return(test.get('namespace') == 'dbt_llm' and test.get('name') == 'llm_judge') }}
{%- endmacro %}
