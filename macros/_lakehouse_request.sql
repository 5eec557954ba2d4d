{# What the plugin has to know of the lakehouse model at hand, whatever it is asked to do. #}
{% macro _lakehouse_request() -%}
  {{ return({
    'package_version': dbt_llm._version(),
    'node_id': model.unique_id,
    'names': [this.database, this.schema, this.identifier],
    'config': {
      'format': config.get('format'),
      'location': render(config.get('location')) if config.get('location') else none,
      'unique_key': config.get('unique_key'),
      'incremental_strategy': config.get('incremental_strategy'),
      'partition_by': config.get('partition_by'),
      'on_schema_change': config.get('on_schema_change'),
      'merge_update_columns': config.get('merge_update_columns'),
      'merge_exclude_columns': config.get('merge_exclude_columns'),
      'incremental_predicates': config.get('incremental_predicates'),
    },
  }) }}
{%- endmacro %}
