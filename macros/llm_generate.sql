{#
  The SQL function llm_generate, for those who write it in Jinja; it yields text.

      dbt_llm.llm_generate("'Summarise: ' || body", max_tokens=40)

  `prompt` is SQL; all other arguments are values, and become literals.
#}
{% macro llm_generate(prompt) -%}
  llm_generate({{ prompt }}{{ dbt_llm._options(kwargs) }})
{%- endmacro %}
