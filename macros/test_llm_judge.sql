{#
  A test of a column: an LLM answers a question about each distinct value, and must say yes.

      models:
        - name: replies
          columns:
            - name: reply
              data_tests:
                - dbt_llm.llm_judge:
                    arguments:
                      question: Is this reply polite?
                      judge: strict_llm

  `judge` names an LLM of the profile; further arguments are options of llm_filter. The rows are
  the values that failed: `value`, `n_records` with it, and `verdict`, which is `no`, or `not
  judged` where the judge gave no answer.
#}
{% test llm_judge(model, column_name, question, judge='default') -%}
  {%- if question is not string or not question.strip() -%}
    {%- do exceptions.raise_compiler_error(
      'llm_judge: question is ' ~ tojson(question, question) ~ '; use a text that yes or no answers.'
    ) -%}
  {%- endif -%}
  {%- set options = ['system', 'max_tokens', 'temperature', 'top_p', 'seed', 'stop', 'extra'] -%}
  {%- for name in kwargs if name not in options -%}
    {%- do exceptions.raise_compiler_error(
      'llm_judge: ' ~ name ~ ' is no argument of it; use question, judge, ' ~ options | join(', ') ~ '.'
    ) -%}
  {%- endfor -%}
with dbt_llm_values as (
    select {{ column_name }} as value, count(*) as n_records
    from {{ model }}
    where {{ column_name }} is not null
    group by 1
),
{#- Materialized, as a `limit` of the test must not end the judging. #}
dbt_llm_judged as materialized (
    select value, n_records, {{ dbt_llm.llm_filter('value', question, model=judge, **kwargs) | trim }} as judged
    from dbt_llm_values
)
select value, n_records, case when not judged then 'no' else 'not judged' end as verdict
from dbt_llm_judged
where judged is distinct from true
order by n_records desc, value
{%- endtest %}
