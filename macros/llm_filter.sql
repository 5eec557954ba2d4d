{#
  The SQL function llm_filter, for those who write it in Jinja; it yields true or false.

      dbt_llm.llm_filter('body', 'Is the customer angry?')

  `text` is SQL; all other arguments are values, and become literals.
#}
{% macro llm_filter(text, question) -%}
  llm_filter({{ text }}, {{ dbt_llm._literal(question) }}{{ dbt_llm._options(kwargs) }})
{%- endmacro %}
