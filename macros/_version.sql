{# The version of these macros; the plugin refuses to work with macros of another version. #}
{% macro _version() -%}
  {{ return('0.1.0') }}
{%- endmacro %}
