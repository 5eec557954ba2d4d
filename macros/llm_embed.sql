{#
  The SQL function llm_embed, for those who write it in Jinja; it yields a list of floats.

      dbt_llm.llm_embed('body', model='embedder')

  `text` is SQL; all other arguments are values, and become literals.
#}
{% macro llm_embed(text) -%}
  llm_embed({{ text }}{{ dbt_llm._options(kwargs) }})
{%- endmacro %}
