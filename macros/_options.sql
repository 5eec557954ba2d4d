{# Named options of an LLM function, as `, name := literal`. #}
{% macro _options(options) -%}
  {%- for name, value in options.items() %}, {{ name }} := {{ dbt_llm._literal(value) }}{% endfor -%}
{%- endmacro %}
