{#
  The SQL function llm_extract, for those who write it in Jinja; it yields a struct of the fields.

      dbt_llm.llm_extract('body', {'name': 'VARCHAR', 'age': 'INTEGER'})

  `text` is SQL; all other arguments are values, and become literals.
#}
{% macro llm_extract(text, fields) -%}
  llm_extract({{ text }}, {{ dbt_llm._literal(fields) }}{{ dbt_llm._options(kwargs) }})
{%- endmacro %}
