import pytest

from dbt_llm.config import Config, load_config
from dbt_llm.errors import ConfigError

REPLAY = {"engine": "replay"}
OPENAI = {"engine": "openai", "model": "gpt-test"}


def problems(raw, settings=None):
    with pytest.raises(ConfigError) as raised:
        load_config(raw, settings)
    first, *lines, last = str(raised.value).splitlines()
    assert first == "The config of the plugin dbt_llm in profiles.yml is wrong:"
    assert last == "See docs/configuration.md for all keys."
    return [line.removeprefix("  - ") for line in lines]


def llm_problems(**entry):
    return problems({"llms": {"default": {**REPLAY, **entry}}})


def test_the_least_config_has_these_defaults():
    config = load_config({"llms": {"default": REPLAY}})
    assert config.store.model_dump() == {
        "path": "lake/llm",
        "format": "delta",
        "storage_options": {},
        "keep_prompts": True,
        "compact": True,
    }
    assert config.ray.address is None
    assert config.max_error_ratio == 0.05
    assert config.commit_interval_s == 5.0
    llm = config.llms["default"]
    assert (llm.engine, llm.model, llm.replicas, llm.system) == ("replay", "replay", 1, None)
    assert llm.sampling.model_dump(exclude_none=True) == {"temperature": 0.0, "max_tokens": 512}
    assert llm.price.model_dump() == {"prompt": 0.0, "completion": 0.0}


def test_a_full_config_is_taken_as_it_is():
    config = load_config(
        {
            "store": {"path": "my lake", "format": "parquet", "keep_prompts": False},
            "llms": {
                "default": {
                    "engine": "vllm",
                    "model": "weights",
                    "engine_args": {"max_model_len": 2048},
                    "sampling": {"temperature": 1, "stop": "\n", "extra": {"top_k": 5}},
                    "system": "Be brief.",
                    "price": {"prompt": 0.15, "completion": 0.6},
                    "replicas": 2,
                    "request_timeout_s": 9,
                }
            },
            "ray": {"address": "head:6379"},
            "max_error_ratio": 0,
            "commit_interval_s": 0.5,
        }
    )
    llm = config.llms["default"]
    assert config.store.format == "parquet"
    assert config.ray.address == "head:6379"
    assert llm.engine_args == {"max_model_len": 2048}
    assert llm.sampling.stop == ("\n",)
    assert llm.price.completion == 0.6


def test_all_problems_are_reported_together_with_key_and_value():
    raw = {
        "store": {"path": "ftp://lake", "format": "csv", "keep_promts": 1},
        "llms": {
            "default": {
                **REPLAY,
                "sampling": {"temperature": -1, "max_tokens": 0, "top_p": 0, "seed": "x"},
                "replicas": 0,
                "rules": [{"promt": "x"}],
                "otherwise": "guess",
            },
            "hosted": {"engine": "grpc"},
            "big": {"engine": "vllm", "price": {"prompt": -1}},
        },
        "ray": {"address": "http://head:8265"},
        "max_error_ratio": 1.5,
        "commit_interval_s": 0,
        "budget": {"max_requests": -1, "on_exceeded": "stop"},
        "budgets": {},
    }
    assert problems(raw) == [
        "store.path: is a URL of an unknown kind; give a folder or one of s3://, s3a://, gs://, "
        "az://, azure://, abfs://, abfss:// (got 'ftp://lake')",
        "store.format: input should be 'delta' or 'parquet' (got 'csv')",
        "store.keep_promts: no such key",
        "llms.default.sampling.temperature: input should be greater than or equal to 0 (got -1)",
        "llms.default.sampling.max_tokens: input should be greater than 0 (got 0)",
        "llms.default.sampling.top_p: input should be greater than 0 (got 0)",
        "llms.default.sampling.seed: input should be a valid integer, unable to parse string as "
        "an integer (got 'x')",
        "llms.default.replicas: input should be greater than 0 (got 0)",
        "llms.default.rules.0.promt: no such key",
        "llms.default.otherwise: input should be 'make_up' or 'error' (got 'guess')",
        "llms.hosted.engine: 'grpc' is no engine; use 'vllm', 'openai', 'replay'",
        "llms.big.price.prompt: input should be greater than or equal to 0 (got -1)",
        "llms.big.model: is missing",
        "ray.address: is a URL; give null, auto or HOST:PORT in this version "
        "(got 'http://head:8265')",
        "budget.max_requests: input should be greater than or equal to 0 (got -1)",
        "budget.on_exceeded: input should be 'error' or 'partial' (got 'stop')",
        "max_error_ratio: input should be less than or equal to 1 (got 1.5)",
        "commit_interval_s: input should be greater than 0 (got 0)",
        "budgets: no such key",
    ]


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ({}, "llms: is missing"),
        ({"llms": []}, "llms: input should be a valid dictionary"),
        (
            {"llms": {"default": {}}},
            "llms.default.engine: is missing; use 'vllm', 'openai' or 'replay'",
        ),
        ({"llms": {"default": {"engine": "vllm"}}}, "llms.default.model: is missing"),
        (
            {"llms": {"vllm": {"engine": "vllm", "model": ""}}},
            "llms.vllm.model: string should have at least 1 character (got '')",
        ),
    ],
)
def test_a_missing_part_is_named(raw, problem):
    assert problems(raw) == [problem]


def test_no_llms_at_all_is_refused():
    assert [line.split(":")[0] for line in problems({"llms": {}})] == ["llms"]


def test_an_unknown_key_is_refused_without_its_value():
    assert llm_problems(api_key="sk-secret") == ["llms.default.api_key: no such key"]


def test_keys_of_the_profile_settings_are_ignored():
    raw = {"llms": {"default": REPLAY}, "memory_limit": "1GB", "threads": 2}
    assert load_config(raw, {"memory_limit": "1GB", "threads": 2}) == load_config(
        {"llms": {"default": REPLAY}}
    )
    assert problems(raw, {"threads": 2}) == ["memory_limit: no such key"]


@pytest.mark.parametrize("name", ["temperature", "top_p"])
@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_sampling_takes_finite_numbers_only(name, number):
    (problem,) = llm_problems(sampling={name: number})
    assert problem.startswith(f"llms.default.sampling.{name}: ")


def test_a_config_cannot_be_changed_later():
    config = load_config({"llms": {"default": REPLAY}})
    assert isinstance(config, Config)
    with pytest.raises(ValueError, match="frozen"):
        config.max_error_ratio = 1.0


def openai_llm(**entry):
    return load_config({"llms": {"default": {**OPENAI, **entry}}}).llms["default"]


def openai_problems(**entry):
    return problems({"llms": {"default": {**OPENAI, **entry}}})


def test_the_least_endpoint_is_openais_own(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-environment")
    for llm in (openai_llm(), openai_llm(base_url=None)):
        assert llm.base_url == "https://api.openai.com/v1"
        assert llm.secrets() == {
            "api_key": "sk-of-the-environment",
            "headers": {},
            "query": {},
            "proxy": None,
        }
    other = openai_llm(base_url="http://localhost:8000/v1")
    assert other.secrets()["api_key"] is None


@pytest.mark.parametrize(
    "base_url",
    [
        "https://user:hunter22@host/v1",
        "https://hunter22@host/v1",
        "https://host/v1?api-key=hunter22",
        "hunter22",
        "ftp://hunter22/v1",
        "https:///hunter22",
        "http://[hunter22/v1",
        "http://hunter22:port/v1",
        "http://hunter22\u2100/v1",
        ["https://hunter22/v1"],
    ],
)
def test_a_wrong_base_url_is_refused_without_repeating_it(base_url):
    (problem,) = openai_problems(base_url=base_url)
    assert problem.startswith("llms.default.base_url: ")
    assert "hunter22" not in problem


def test_what_a_base_url_may_not_hold_is_named():
    assert openai_problems(base_url="https://user:hunter22@host/v1") == [
        "llms.default.base_url: holds a user, a password or a query; use api_key, headers and query"
    ]


def test_two_keys_are_refused():
    assert openai_problems(api_key="sk-secret", api_key_env="SOME_KEY") == [
        "llms.default: has both api_key and api_key_env; give one"
    ]


def test_a_key_is_taken_from_the_variable_that_is_named(monkeypatch):
    llm = openai_llm(api_key_env="TEAM_KEY", base_url="https://host/v1")
    monkeypatch.delenv("TEAM_KEY", raising=False)
    for unset in (None, ""):
        if unset is not None:
            monkeypatch.setenv("TEAM_KEY", unset)
        with pytest.raises(ConfigError) as raised:
            llm.secrets()
        assert str(raised.value) == (
            "The environment variable TEAM_KEY (api_key_env of the model gpt-test) is not set. "
            "Set it to the key of https://host/v1."
        )
    monkeypatch.setenv("TEAM_KEY", "sk-of-the-team\n")
    assert llm.secrets()["api_key"] == "sk-of-the-team"


def test_a_key_in_the_place_of_a_variables_name_is_not_repeated():
    assert openai_problems(api_key_env="sk-secret-1234") == [
        "llms.default.api_key_env: is no name of an environment variable"
    ]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("api_key", ["hunter22"]),
        ("api_key", {"key": "hunter22"}),
        ("api_key", 2222222),
        ("headers", "hunter22"),
        ("headers", {"x-key": ["hunter22"]}),
        ("headers", {"x-key": 2222222}),
        ("headers", ["hunter22"]),
        ("query", "hunter22"),
        ("query", {"key": {"hunter22": 1}}),
        ("proxy", ["hunter22"]),
        ("proxy", 2222222),
    ],
)
def test_a_wrong_type_never_shows_a_secret(key, value):
    (problem,) = openai_problems(**{key: value})
    assert problem.startswith(f"llms.default.{key}")
    assert "hunter22" not in problem
    assert "2222222" not in problem


def test_a_prompt_cannot_be_cut_for_an_endpoint():
    assert openai_problems(on_long_prompt="truncate") == [
        "llms.default.on_long_prompt: needs the model's tokenizer, which only the engine vllm has "
        "(got 'truncate')"
    ]
    assert openai_llm(on_long_prompt="error").on_long_prompt == "error"


def test_secrets_are_shown_to_the_engine_alone():
    secrets = {
        "api_key": "sk-hunter22",
        "headers": {"x-key": "header-hunter22"},
        "query": {"key": "query-hunter22"},
        "proxy": "http://user:hunter22@proxy:3128",
    }
    config = load_config({"llms": {"default": {**OPENAI, **secrets}}})
    llm = config.llms["default"]
    assert llm.secrets() == secrets
    shown = [repr(config), str(config), repr(llm), config.model_dump_json()]
    shown += [str(config.model_dump(mode=mode)) for mode in ("json", "python")]
    assert not [text for text in shown if "hunter22" in text]


def test_numbers_of_an_endpoint_are_positive():
    assert openai_problems(
        requests_per_minute=0, tokens_per_minute=-1, max_concurrency=0, embedding_batch=0
    ) == [
        "llms.default.requests_per_minute: input should be greater than 0 (got 0)",
        "llms.default.tokens_per_minute: input should be greater than 0 (got -1)",
        "llms.default.max_concurrency: input should be greater than 0 (got 0)",
        "llms.default.embedding_batch: input should be greater than 0 (got 0)",
    ]


def test_a_budget_in_dollars_needs_a_price():
    assert openai_problems(budget={"max_cost_usd": 5}) == [
        "llms.default: has budget.max_cost_usd and no price, so it would never be reached"
    ]
    priced = openai_llm(budget={"max_cost_usd": 5}, price={"prompt": 1})
    assert priced.budget.max_cost_usd == 5
