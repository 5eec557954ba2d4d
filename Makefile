# Everything that a person or CI does here. `make demo` is the place to begin.
VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
WEIGHTS := example_project/weights/SmolLM2-135M-Instruct
DUCKDB2 := $(VENV)/duckdb-2
# What is sent to endpoints, spent, logged and shown does not depend on the version of DuckDB, so these run once.
RUN_ONCE := *test_endpoint* *test_engine_* *test_throttle* *test_terminal* *test_command_line* *test_doctor* \
	*test_budget* *test_run_log* *test_report*

.PHONY: demo test test-fast faults check format bench install weights clean

demo: install weights  ## Run the example project against a real LLM, twice.
	@DBT_LLM_VENV="$(VENV)" bash scripts/demo.sh

test: install weights $(DUCKDB2)  ## All tests; the functional ones on DuckDB 1.5 and on 2.0.
	$(PY) -m pytest -n 2 tests/unit tests/functional
	PYTHONPATH=$(abspath $(DUCKDB2)) $(PY) -m pytest -n 2 tests/unit tests/functional $(RUN_ONCE:%=--ignore-glob=%)
	$(PY) -m pytest -n 2 --dist loadfile tests/faults
	$(PY) -m pytest tests/e2e

faults: install weights  ## The long fault campaign: 100 kills, and what takes gigabytes. An hour.
	$(PY) -m tests.faults.campaign
	$(PY) -m pytest -m long tests/faults

test-fast: install  ## Unit tests alone.
	$(PY) -m pytest tests/unit

check: install  ## Format, lint and types.
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

format: install
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

bench: install
	$(PY) bench/run.py

install:
	@DBT_LLM_VENV="$(VENV)" PYTHON="$(PYTHON)" bash scripts/install.sh

weights: install
	@$(PY) scripts/prepare_weights.py --out $(WEIGHTS)

# DuckDB 2.0 beside 1.5: the tests put this folder first on the path.
$(DUCKDB2): | install
	$(PY) -m pip install -q --no-deps --target $@ duckdb==2.0.1

clean:  ## Remove what the demo and the tests made; installed packages and weights stay.
	rm -rf example_project/lake/llm example_project/lake/replay example_project/lake/tables \
		example_project/lake/*.parquet
	rm -rf example_project/target example_project/logs example_project/dbt_packages
	rm -f example_project/*.duckdb example_project/*.wal example_project/package-lock.yml
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
