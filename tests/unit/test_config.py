import pytest

from dbt_llm.config import Config, load_config
from dbt_llm.errors import ConfigError

REPLAY = {"engine": "replay"}


def problems(raw, ignore=()):
    with pytest.raises(ConfigError) as raised:
        load_config(raw, ignore)
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
        "keep_prompts": True,
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
        "store": {"path": "s3://lake", "format": "csv", "keep_promts": 1},
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
        "budget": {},
    }
    assert problems(raw) == [
        "store.path: is a URL; a store is a local folder in this version (got 's3://lake')",
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
        "llms.hosted.engine: 'grpc' is no engine; use 'vllm', 'replay'",
        "llms.big.price.prompt: input should be greater than or equal to 0 (got -1)",
        "llms.big.model: is missing",
        "ray.address: is a URL; give null, auto or HOST:PORT in this version "
        "(got 'http://head:8265')",
        "max_error_ratio: input should be less than or equal to 1 (got 1.5)",
        "commit_interval_s: input should be greater than 0 (got 0)",
        "budget: no such key",
    ]


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ({}, "llms: is missing"),
        ({"llms": []}, "llms: input should be a valid dictionary"),
        ({"llms": {"default": {}}}, "llms.default.engine: is missing; use 'vllm' or 'replay'"),
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
    assert load_config(raw, ignore={"memory_limit": "1GB", "threads": 2}) == load_config(
        {"llms": {"default": REPLAY}}
    )
    assert problems(raw, ignore=["threads"]) == ["memory_limit: no such key"]


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
