{#
  A test of a model: of the prompts that it asked, at most this share may have no good answer.

      models:
        - name: tickets
          data_tests:
            - dbt_llm.llm_error_ratio:
                arguments:
                  max_ratio: 0.02

  It reads the store and asks nothing. A prompt with a good answer, whoever asked it, has not
  failed. The rows are one per error code. `since` is SQL for a time, such as `now() - interval 7
  day`, and leaves out the prompts that the model has not asked since.
#}
{% test llm_error_ratio(model, max_ratio=0.05, since=none) -%}
  {%- if max_ratio is boolean or max_ratio is not number or not 0 <= max_ratio <= 1 -%}
    {%- do exceptions.raise_compiler_error(
      'llm_error_ratio: max_ratio is ' ~ tojson(max_ratio, max_ratio) ~ '; use a number from 0 to 1.'
    ) -%}
  {%- endif -%}
  {%- if since is not none and (since is not string or not since.strip()) -%}
    {%- do exceptions.raise_compiler_error(
      'llm_error_ratio: since is ' ~ tojson(since, since) ~ '; use SQL for a time, such as "now() - interval 7 day".'
    ) -%}
  {%- endif -%}
  {%- if execute and config.get('where') -%}
    {%- do exceptions.raise_compiler_error(
      "llm_error_ratio: it counts prompts, and the config `where` chooses rows. Set where: '' for this "
      ~ 'test; its argument `since` leaves out old prompts.'
    ) -%}
  {%- endif -%}
with dbt_llm_answers as (
    select prompt_hash, status, error_code, node_id, created_at from {{ dbt_llm.generations() }}
),
dbt_llm_asked as (
    select distinct prompt_hash
    from dbt_llm_answers
    where node_id = {{ dbt_llm._literal(dbt_llm._tested_node(model)) }}
    {%- if since is not none %} and created_at >= ({{ since }}){% endif %}
),
dbt_llm_best as (
    select * from dbt_llm_answers semi join dbt_llm_asked using (prompt_hash)
    qualify row_number() over (
        partition by prompt_hash order by status = 'ok' desc, created_at desc
    ) = 1
),
dbt_llm_failed as (
    select
        error_code,
        count(*) as prompts,
        count(*) / (select count(*) from dbt_llm_best) as ratio,
        min(prompt_hash) as example_prompt_hash
    from dbt_llm_best
    where status <> 'ok'
    group by error_code
)
select *
from dbt_llm_failed
where (
    select count(*) filter (status <> 'ok') / count(*) from dbt_llm_best
) > {{ max_ratio }}::double
order by prompts desc, error_code
{%- endtest %}
