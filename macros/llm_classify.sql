{#
  The SQL function llm_classify, for those who write it in Jinja; it yields one of the labels.

      dbt_llm.llm_classify('body', ['praise', 'complaint'])

  `text` is SQL; all other arguments are values, and become literals.
#}
{% macro llm_classify(text, labels) -%}
  llm_classify({{ text }}, {{ dbt_llm._literal(labels) }}{{ dbt_llm._options(kwargs) }})
{%- endmacro %}
