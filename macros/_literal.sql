{# A Jinja value as a SQL literal; a mapping becomes JSON text, and a NUL chr(0) as in sql.py. #}
{% macro _literal(value) -%}
  {%- if value is none -%}
    null
  {%- elif value is boolean or value is number -%}
    {{ value | lower }}
  {%- elif value is string -%}
    {%- set quoted = "'" ~ (value | replace("'", "''") | replace('\0', "' || chr(0) || '")) ~ "'" -%}
    {{ '(' ~ quoted ~ ')' if '\0' in value else quoted }}
  {%- elif value is mapping -%}
    {{ dbt_llm._literal(tojson(value)) }}
  {%- else -%}
    [{% for item in value %}{{ dbt_llm._literal(item) }}{{ ', ' if not loop.last }}{% endfor %}]
  {%- endif -%}
{%- endmacro %}
