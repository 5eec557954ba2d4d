{#
  The SQL function llm_prompt_hash, for those who write it in Jinja; it yields the key of the answer in the store.

      dbt_llm.llm_prompt_hash('body')

  `prompt` is SQL; all other arguments are values, and become literals.
#}
{% macro llm_prompt_hash(prompt) -%}
  llm_prompt_hash({{ prompt }}{{ dbt_llm._options(kwargs) }})
{%- endmacro %}
