"""The plugin's config in the dbt profile: checked as a whole, all problems reported together."""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from dbt_llm.credentials import SCHEMES, is_url, storage_options
from dbt_llm.errors import ConfigError

_SECRET_KEYS = {
    *("api_key", "api_key_env", "base_url", "headers", "query", "proxy"),
    "storage_options",
}
OPENAI = "https://api.openai.com/v1"
"""Where the engine `openai` asks when the profile names no other address."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Place(_Section):
    path: str
    storage_options: dict[str, SecretStr] = Field(
        default={}, description="What opens an object store; the keys are those of delta-rs."
    )

    @field_validator("path")
    @classmethod
    def _is_a_place(cls, path: str) -> str:
        if "\0" in path:
            raise ValueError("holds a NUL")
        if not is_url(path):
            return path
        scheme, _, rest = path.partition("://")
        if scheme not in SCHEMES:
            allowed = ", ".join(f"{one}://" for one in SCHEMES)
            raise ValueError(f"is a URL of an unknown kind; give a folder or one of {allowed}")
        bucket, *folders = rest.rstrip("/").split("/")
        if not bucket or any(part in {"", ".", ".."} for part in folders):
            raise ValueError("names no bucket, or has an empty folder in it")
        # The libraries do not agree about what has to be escaped.
        if re.search(r"[^\w.=@/-]", rest, re.ASCII):
            raise ValueError("holds other characters than letters, digits, - _ . = and /")
        return path.rstrip("/")

    @field_validator("storage_options", mode="before")
    @classmethod
    def _as_text(cls, options: Any) -> Any:
        if not isinstance(options, dict):
            return options
        # YAML makes numbers and booleans of what delta-rs wants as text.
        return {
            key: str(value).lower() if isinstance(value, bool | int | float) else value
            for key, value in options.items()
        }

    @model_validator(mode="after")
    def _options_of_url(self) -> Self:
        if self.storage_options and not is_url(self.path):
            raise ValueError("has storage_options, and path is a folder, which needs none")
        return self

    def options(self) -> dict[str, str]:
        """Return `storage_options` in clear; for the libraries alone."""
        return {key: value.get_secret_value() for key, value in self.storage_options.items()}


class StoreConfig(_Place):
    """Where generations are kept."""

    path: str = Field(
        default="lake/llm",
        min_length=1,
        description="A folder or s3://BUCKET/PREFIX, gs:// or az://; holds generations/ and runs/.",
    )
    format: Literal["delta", "parquet"] = "delta"
    keep_prompts: bool = Field(
        default=True, description="false stores the hash of a prompt but not its text."
    )
    compact: bool = Field(
        default=True,
        description="Merge small files and write checkpoints at the end of a run, where it is due.",
    )


class LakehouseConfig(_Place):
    """Where models of the materialization `lakehouse` lie that name no `location`."""

    path: str = Field(
        default="lake/tables",
        min_length=1,
        description="A folder or a URL as of the store; holds DATABASE/SCHEMA/MODEL.",
    )


class Sampling(_Section):
    """How an LLM decodes; every field is part of a prompt's key."""

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        default=0.0, description="null sends none: the engine's own default applies."
    )
    max_tokens: PositiveInt = 512
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    extra: dict[str, Any] | None = Field(
        default=None, description="More parameters of the engine, such as top_k for vLLM."
    )

    @field_validator("temperature")
    @classmethod
    def _one_zero(cls, temperature: float | None) -> float | None:
        # -0.0 is equal to 0.0, but would be another key.
        return None if temperature is None else temperature + 0.0

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, stop: Any) -> Any:
        return (stop,) if isinstance(stop, str) else stop


class Price(_Section):
    """USD per million tokens."""

    prompt: NonNegativeFloat = 0.0
    completion: NonNegativeFloat = 0.0

    def of(self, prompt_tokens: float, completion_tokens: float) -> float:
        """Return what tokens cost, in USD."""
        return (prompt_tokens * self.prompt + completion_tokens * self.completion) / 1_000_000


class Budget(_Section):
    """The most that may be used; null: no limit."""

    max_requests: NonNegativeInt | None = None
    max_tokens: NonNegativeInt | None = Field(
        default=None, description="Prompt and completion tokens together."
    )
    max_cost_usd: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


class RunBudget(Budget):
    """That of a whole run, and what happens where one is too small."""

    on_exceeded: Literal["error", "partial"] = Field(
        default="error",
        description="Refuse before the first request | ask up to the limit, the rest is NULL.",
    )

    def tightened(self, max_cost_usd: float | None) -> "RunBudget":
        """Return the same budget with a cost that is at most this."""
        if max_cost_usd is None:
            return self
        own = self.max_cost_usd
        most = max_cost_usd if own is None else min(own, max_cost_usd)
        return self.model_copy(update={"max_cost_usd": most})


class _LLM(_Section):
    sampling: Sampling = Sampling()
    system: str | None = Field(
        default=None, description="The system prompt of calls that give none."
    )
    price: Price = Price()
    budget: Budget = Budget()
    replicas: PositiveInt = 1
    on_long_prompt: Literal["error", "truncate"] = Field(
        default="error",
        description="A prompt over the context length fails, or its text loses its end.",
    )
    chat_template_options: dict[str, Any] = Field(
        default={}, description="Variables of the chat template, such as enable_thinking."
    )
    start_timeout_s: PositiveFloat = Field(
        default=1800.0, description="An engine that needs longer to start is given up."
    )
    request_timeout_s: PositiveFloat = Field(
        default=600.0, description="A request that takes longer becomes the row error `timeout`."
    )

    def secrets(self) -> dict[str, Any]:
        """Return what the engine needs and nobody may see."""
        return {}

    @model_validator(mode="after")
    def _price_of_budget(self) -> Self:
        if self.budget.max_cost_usd is not None and not (
            self.price.prompt or self.price.completion
        ):
            raise ValueError("has budget.max_cost_usd and no price, so it would never be reached")
        return self


class VllmLLM(_LLM):
    """An open-weights model that vLLM runs, on this machine or on the Ray cluster."""

    engine: Literal["vllm"]
    model: str = Field(min_length=1, description="A folder with weights, or a model id.")
    engine_args: dict[str, Any] = Field(default={}, description="Passed to vLLM's AsyncEngineArgs.")


class OpenAILLM(_LLM):
    """A model behind an OpenAI-compatible HTTP API."""

    engine: Literal["openai"]
    model: str = Field(min_length=1, description="The name that the server knows it by.")
    base_url: str = Field(default=OPENAI, description="null: OpenAI's own.")
    api_key_env: str | None = Field(
        default=None, description="The environment variable that holds the key."
    )
    api_key: SecretStr | None = Field(
        default=None, description="The key itself; an env_var of dbt, never the text."
    )
    headers: dict[str, SecretStr] = Field(default={}, description="Sent with every request.")
    query: dict[str, SecretStr] = Field(default={}, description="Sent in every address.")
    max_tokens_parameter: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    structured_outputs: Literal["json_schema", "json_object", "none"] = Field(
        default="json_schema", description="How the server is told about labels and fields."
    )
    requests_per_minute: PositiveFloat | None = None
    tokens_per_minute: PositiveFloat | None = None
    max_concurrency: PositiveInt = Field(
        default=256, description="Requests under way at once, at most; fewer where it is refused."
    )
    attempt_timeout_s: PositiveFloat = Field(default=120.0, description="Of one HTTP request.")
    max_attempts: PositiveInt = Field(
        default=6, description="Failed ones; those refused for the rate (429) do not count."
    )
    max_retry_after_s: PositiveFloat = Field(
        default=120.0, description="A longer Retry-After is cut to this."
    )
    embedding_batch: PositiveInt = Field(default=32, description="Texts per embeddings request.")
    proxy: SecretStr | None = Field(
        default=None, description="null: HTTPS_PROXY and NO_PROXY apply."
    )
    ca_file: str | None = Field(
        default=None, description="Certificates to trust. null: SSL_CERT_FILE, or the system's."
    )

    @field_validator("base_url", mode="before")
    @classmethod
    def _or_openai(cls, base_url: Any) -> Any:
        return OPENAI if base_url is None else base_url

    @field_validator("base_url")
    @classmethod
    def _is_plain(cls, base_url: str) -> str:
        try:
            parts = urlsplit(base_url)
            valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        except ValueError:
            # Its message may repeat the address.
            valid = False
        if not valid:
            raise ValueError("is no http:// or https:// address")
        if parts.username or parts.password or parts.query:
            raise ValueError("holds a user, a password or a query; use api_key, headers and query")
        return base_url

    @field_validator("api_key_env")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        # Somebody may give the key itself.
        if name is not None and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None:
            raise ValueError("is no name of an environment variable")
        return name

    @field_validator("on_long_prompt")
    @classmethod
    def _cannot_cut(cls, choice: str) -> str:
        if choice != "error":
            raise ValueError("needs the model's tokenizer, which only the engine vllm has")
        return choice

    @model_validator(mode="after")
    def _one_key(self) -> Self:
        if self.api_key is not None and self.api_key_env is not None:
            raise ValueError("has both api_key and api_key_env; give one")
        return self

    def secrets(self) -> dict[str, Any]:
        """Return api_key, headers, query and proxy in clear; for the engine alone.

        Raises:
            ConfigError: the variable named by `api_key_env` is not set.
        """
        key = self.api_key.get_secret_value() if self.api_key is not None else None
        if self.api_key_env is not None:
            key = os.environ.get(self.api_key_env)
            if not key:
                raise ConfigError(
                    f"The environment variable {self.api_key_env} (api_key_env of the model "
                    f"{self.model}) is not set. Set it to the key of {self.base_url}."
                )
        elif key is None and self.base_url.rstrip("/") == OPENAI:
            key = os.environ.get("OPENAI_API_KEY")
        return {
            # A line break at its end comes from a file, and could not be sent.
            "api_key": key.strip() if key is not None else None,
            "headers": {name: value.get_secret_value() for name, value in self.headers.items()},
            "query": {name: value.get_secret_value() for name, value in self.query.items()},
            "proxy": self.proxy.get_secret_value() if self.proxy is not None else None,
        }


class ReplayRule(_Section):
    """One scripted or recorded answer: the first rule that fits a prompt decides."""

    call: dict[str, Any] | None = Field(
        default=None, description="The call that it answers, less the model; null: any."
    )
    prompt: str | None = Field(default=None, description="The whole prompt.")
    contains: str | None = Field(default=None, description="A part of the prompt.")
    output: str | None = None
    embedding: tuple[float, ...] | None = None
    error_code: str | None = None
    error: str | None = None
    finish_reason: str = "stop"
    prompt_tokens: NonNegativeInt | None = None
    completion_tokens: NonNegativeInt | None = None
    delay_s: NonNegativeFloat = 0.0
    death: Literal["engine", "process", "hang"] | None = Field(
        default=None, description="What the prompt does to the engine; to test what follows."
    )


class ReplayLLM(_LLM):
    """Recorded, scripted or made-up answers, for tests and CI: no weights, no network."""

    engine: Literal["replay"]
    model: str = Field(default="replay", min_length=1)
    answers: str | None = Field(
        default=None,
        description="A JSON-lines file of rules: prompt or contains, output, error_code …",
    )
    rules: tuple[ReplayRule, ...] = ()
    otherwise: Literal["make_up", "error"] = Field(
        default="make_up", description="What happens to a prompt that no rule fits."
    )
    latency_s: NonNegativeFloat = Field(default=0.0, description="Seconds that every answer takes.")
    concurrency: PositiveInt = Field(default=64, description="Answers under way at once.")


LLMConfig = Annotated[VllmLLM | OpenAILLM | ReplayLLM, Field(discriminator="engine")]


class RayConfig(_Section):
    """Where jobs run."""

    address: str | None = Field(
        default=None,
        description="null: a private Ray on this machine | auto | HOST:PORT of a cluster.",
    )

    @field_validator("address")
    @classmethod
    def _is_joinable(cls, address: str | None) -> str | None:
        if address is not None and "://" in address:
            raise ValueError("is a URL; give null, auto or HOST:PORT in this version")
        return address


class Config(_Section):
    """All that a profile says to this plugin."""

    store: StoreConfig = StoreConfig()
    lakehouse: LakehouseConfig = LakehouseConfig()
    llms: dict[str, LLMConfig] = Field(min_length=1)
    ray: RayConfig = RayConfig()
    budget: RunBudget = RunBudget()
    limit: NonNegativeInt | None = Field(
        default=None,
        description="New answers per model, the rest is NULL; the dbt variable llm_limit wins.",
    )
    max_error_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.05,
        description="A model fails when more than this share of its new answers failed.",
    )
    commit_interval_s: PositiveFloat = Field(
        default=5.0, description="Seconds between two commits while a job runs."
    )


def load_config(
    raw: Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
    secrets: Iterable[Mapping[str, Any]] = (),
) -> Config:
    """Check the plugin's part of a profile, and find what opens its object store.

    `settings` are the profile's, which dbt-duckdb adds to the plugin's config; `secrets` are those
    that the profile has for DuckDB (see `credentials.storage_options`).

    Raises:
        ConfigError: with every problem: the key, what is wrong, and the value received.
    """
    own = {key: value for key, value in raw.items() if key not in (settings or {})}
    try:
        config = Config.model_validate(own)
    except ValidationError as error:
        problems = "\n".join(f"  - {_describe(problem)}" for problem in error.errors())
        raise ConfigError(
            "The config of the plugin dbt_llm in profiles.yml is wrong:\n"
            f"{problems}\n"
            "See docs/configuration.md for all keys."
        ) from None
    opened = {}
    for name in ("store", "lakehouse"):
        place: _Place = getattr(config, name)
        if is_url(place.path):
            options = storage_options(place.path, place.options(), secrets, settings)
            found = {key: SecretStr(value) for key, value in options.items()}
            opened[name] = place.model_copy(update={"storage_options": found})
    return config.model_copy(update=opened)


def _describe(problem: Any) -> str:
    # pydantic puts the tag of a union member into the location; users do not write that.
    parts = [str(part) for part in problem["loc"]]
    if len(parts) > 2 and parts[0] == "llms" and parts[2] in {"vllm", "openai", "replay"}:
        del parts[2]
    key = ".".join(parts) or "config"
    kind = problem["type"]
    if kind == "extra_forbidden":
        return f"{key}: no such key"
    if kind == "missing":
        return f"{key}: is missing"
    if kind == "union_tag_invalid":
        context = problem["ctx"]
        return f"{key}.engine: {context['tag']!r} is no engine; use {context['expected_tags']}"
    if kind == "union_tag_not_found":
        return f"{key}.engine: is missing; use 'vllm', 'openai' or 'replay'"
    message = problem["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    # What may hold a secret is not repeated in a log.
    if not _SECRET_KEYS.isdisjoint(parts) or re.search(r"://.*[@?]", str(problem["input"])):
        return f"{key}: {message}"
    if isinstance(problem["input"], str | int | float | bool):
        return f"{key}: {message} (got {problem['input']!r})"
    return f"{key}: {message}"
