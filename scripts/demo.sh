#!/usr/bin/env bash
# Build the example project, show what came out, and build it again to see that nothing is asked twice.
#
#   scripts/demo.sh           with SmolLM2 on this machine (run scripts/install.sh and scripts/prepare_weights.py first)
#   scripts/demo.sh replay    with made-up answers, without a model
#
# Nothing is deleted: where the store already has answers, the first build uses them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target="${1:-dev}"
case "$target" in
    dev) database=support.duckdb store=lake/llm ;;
    replay) database=replay.duckdb store=lake/replay ;;
    *) echo "demo: the target is dev or replay, not '$target'" >&2 && exit 2 ;;
esac

bin="$(cd "${DBT_LLM_VENV:-.venv}" 2>/dev/null && pwd || true)/bin"
if [[ ! -x "$bin/dbt" ]]; then
    echo "demo: there is no dbt in ${DBT_LLM_VENV:-.venv}. Run scripts/install.sh first." >&2
    exit 1
fi
show() { "$bin/python" ../scripts/show_sample.py --database "$database" --store "$store" "$@"; }
headline() { printf '\n=== %s\n' "$*"; }
# Without the lines of tests that start and pass; a test that fails still shows.
build() { "$bin/dbt" build --target "$target" | grep --line-buffered --invert-match -e ' START test ' -e ' PASS '; }

cd example_project
if [[ "$target" == dev && ! -f weights/SmolLM2-135M-Instruct/model.safetensors ]]; then
    echo "demo: the weights are missing. Run $bin/python scripts/prepare_weights.py first." >&2
    exit 1
fi

before="$(show --count)"
if [[ "$before" == 0 ]]; then
    headline "The store $store is empty: the first build asks the model"
else
    headline "The store $store already has $before answers: the first build uses them"
    echo "To start afresh, remove example_project/$store and example_project/$database."
fi
"$bin/dbt" --quiet deps
build
first="$(show --count)"

headline "What came out"
show

headline "The same build again"
build
second="$(show --count)"

if [[ "$first" != "$second" ]]; then
    headline "The second build asked $((second - first)) requests again"
    echo "That is right for requests that failed for a passing reason, such as a timeout."
    exit 1
fi
headline "The first build asked $((first - before)) requests. The second build asked nothing."
