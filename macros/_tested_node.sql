{# The unique id of the node that the test at hand is about; `relation` is the test's model. #}
{% macro _tested_node(relation) -%}
  {%- if not execute -%}
    {{ return('') }}
  {%- endif -%}
  {%- set found = [model.get('attached_node')] | select | list -%}
  {%- if not found -%}
    {%- set found = graph.nodes.values() | selectattr('relation_name', 'equalto', relation | string)
      | map(attribute='unique_id') | list -%}
  {%- endif -%}
  {%- set node = graph.nodes.get(found[0]) if found | length == 1 -%}
  {%- if not node or node.resource_type not in ('model', 'snapshot') -%}
    {%- do exceptions.raise_compiler_error(
      'llm_error_ratio: ' ~ relation ~ ' is no model or snapshot of this project, and so asks nothing.'
    ) -%}
  {%- elif node.config.materialized == 'ephemeral' -%}
    {%- do exceptions.raise_compiler_error(
      'llm_error_ratio: ' ~ node.name ~ ' is ephemeral, and its prompts are asked by the models that '
      ~ 'use it. Test these.'
    ) -%}
  {%- endif -%}
  {{ return(node.unique_id) }}
{%- endmacro %}
