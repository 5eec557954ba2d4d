{#
  The SQL function llm_details, for those who write it in Jinja; it yields the answer with its status, error, tokens and cost.

      dbt_llm.llm_details('body').status

  `prompt` is SQL; all other arguments are values, and become literals.
#}
{% macro llm_details(prompt) -%}
  llm_details({{ prompt }}{{ dbt_llm._options(kwargs) }})
{%- endmacro %}
