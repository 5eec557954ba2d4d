"""The `openai` engine: any endpoint that speaks OpenAI's HTTP API, through the `openai` SDK.

When to send is the throttle's matter, what a failure means `openai_failure`'s; here is what is
done about it. A refusal that may concern every request (a wrong key, a parameter that the server
does not know) is checked by one tiny request of our own before it is held against the row.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from typing import Any

import pyarrow as pa

from dbt_llm.attempts import Outcome, Patience, T, persist
from dbt_llm.call import canonical_json
from dbt_llm.engine import Emit
from dbt_llm.errors import EndpointError
from dbt_llm.openai_client import (
    extra_arguments,
    import_openai,
    most_connections,
    new_client,
    to_mask,
)
from dbt_llm.openai_failure import Failure, Retry, cleaner, failure_of
from dbt_llm.openai_request import (
    chat_messages,
    chat_options,
    estimate_tokens,
    is_wrapped,
    read_completion,
    read_embeddings,
)
from dbt_llm.outbox import Outbox
from dbt_llm.schema import Answer
from dbt_llm.throttle import Throttle

_TRIAL_REQUESTS = 8
_CONTROL = "Hi"
_CONTROL_TOKENS = 16
# So many suspicious refusals in a row are looked into even where requests went well before.
_SUSPICIOUS = 5
_SMOOTHING = 0.05

Row = tuple[str, str]
"""A prompt hash and its prompt."""


@dataclass(eq=False)
class _Standing:
    """How an endpoint takes the requests of one call."""

    options: dict[str, Any]
    """What all its chat requests have in common; empty for embeddings."""
    units: int = 0
    """Under way."""
    accepted: bool = False
    trial: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_TRIAL_REQUESTS))
    """Held by requests until the first answer: what is wrong with one may be wrong with all."""
    refused: int = 0
    """In a row, of those refusals that may concern every request."""
    checked_at: float = float("-inf")
    checking: asyncio.Lock = field(default_factory=asyncio.Lock)
    stopped: EndpointError | None = None


class OpenAIEngine:
    """See the module's text."""

    def __init__(self, config: dict[str, Any], secrets: dict[str, Any]) -> None:
        """`secrets` holds api_key (None: send none), headers, query and proxy."""
        import_openai()
        self._config = config
        self.version: str = version("openai")
        self.concurrency: int = most_connections(config["max_concurrency"])
        self._secrets = to_mask(secrets)
        self._client = new_client(config, secrets)
        self._per_request = extra_arguments(config, secrets)
        self._patience = Patience(
            config["attempt_timeout_s"], config["request_timeout_s"], config["max_attempts"]
        )
        self._throttle = Throttle(
            self.concurrency,
            config["requests_per_minute"],
            config["tokens_per_minute"],
            slow_s=config["attempt_timeout_s"] / 4,
        )
        self._standings: dict[str, _Standing] = {}
        self._answered_at = float("-inf")
        self._length: float | None = None

    async def answer(self, requests: pa.Table, call: dict[str, Any], emit: Emit) -> None:
        """Answer every request; see `Engine.answer`.

        Raises:
            EndpointError: the endpoint refuses every request of the call, or is not there.
        """
        rows = list(
            zip(requests["prompt_hash"].to_pylist(), requests["prompt"].to_pylist(), strict=True)
        )
        embeds = call["output"]["type"] == "embedding"
        key = canonical_json(call)
        if key not in self._standings:
            self._standings[key] = _Standing({} if embeds else chat_options(call, self._config))
        standing = self._standings[key]
        if standing.units == 0:
            standing.stopped = None
        standing.units += 1
        outbox = Outbox(emit)
        if embeds:
            size = self._config["embedding_batch"]
            batches = [rows[at : at + size] for at in range(0, len(rows), size)]
            work = [partial(self._embed, batch, call, standing, outbox) for batch in batches]
        else:
            work = [partial(self._chat, row, call, standing, outbox) for row in rows]
        tasks = [asyncio.ensure_future(_in_trial(standing, one)) for one in work]
        try:
            # Requests under way when the endpoint is found out are waited for: they are paid.
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            standing.units -= 1
            outbox.flush()
        if standing.stopped is not None:
            raise standing.stopped

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _chat(
        self, row: Row, call: dict[str, Any], standing: _Standing, outbox: Outbox
    ) -> None:
        outcome = await self._complete(row, call, standing)
        if outcome is None:
            return
        if outcome.value is not None:
            self._note_length(outcome.value)
            outbox.add(
                replace(outcome.value, latency_s=outcome.latency_s, attempts=outcome.attempts)
            )
        elif not await self._concerns_all(outcome, call, standing):
            outbox.add(_failed(row[0], outcome))

    async def _complete(
        self, row: Row, call: dict[str, Any], standing: _Standing, control: Patience | None = None
    ) -> Outcome[Answer] | None:
        prompt_hash, prompt = row
        messages = chat_messages(call, prompt)
        options = standing.options
        if control is not None:
            options = {**options, self._config["max_tokens_parameter"]: _CONTROL_TOKENS}
        clean = cleaner(self._secrets, prompt)
        sent_text = "".join(message["content"] for message in messages)

        async def once() -> Answer | Failure:
            completion = await self._client.chat.completions.create(
                messages=messages, **options, **self._per_request
            )
            wrapped = is_wrapped(call, self._config)
            return read_completion(prompt_hash, completion, sent_text, wrapped, clean)

        most = call["sampling"]["max_tokens"]
        # A server may say that an answer was longer than it can be.
        expected = most if self._length is None else min(self._length, most)
        return await self._persist(
            self._guarded(once, clean),
            estimate_tokens(sent_text) + expected,
            standing,
            lambda answer: (answer.prompt_tokens or 0) + (answer.completion_tokens or 0),
            control,
        )

    async def _embed(
        self, rows: list[Row], call: dict[str, Any], standing: _Standing, outbox: Outbox
    ) -> None:
        outcome = await self._vectors(rows, call, standing)
        if outcome is None:
            return
        if outcome.value is not None:
            for answer in outcome.value:
                outbox.add(replace(answer, latency_s=outcome.latency_s, attempts=outcome.attempts))
            return
        if await self._concerns_all(outcome, call, standing):
            return
        assert outcome.failure is not None
        if len(rows) > 1 and outcome.failure.retry in {Retry.NEVER, Retry.LATER}:
            # One text of many may be at fault: the halves are asked on their own.
            middle = len(rows) // 2
            await self._embed(rows[:middle], call, standing, outbox)
            await self._embed(rows[middle:], call, standing, outbox)
        else:
            for prompt_hash, _ in rows:
                outbox.add(_failed(prompt_hash, outcome))

    async def _vectors(
        self,
        rows: list[Row],
        call: dict[str, Any],
        standing: _Standing,
        control: Patience | None = None,
    ) -> Outcome[list[Answer]] | None:
        texts = [prompt for _, prompt in rows]
        clean = cleaner(self._secrets, "\n".join(texts))
        extra = call.get("sampling", {}).get("extra")

        async def once() -> list[Answer] | Failure:
            reply = await self._client.embeddings.create(
                model=self._config["model"], input=texts, extra_body=extra, **self._per_request
            )
            return read_embeddings(rows, reply, clean)

        return await self._persist(
            self._guarded(once, clean),
            sum(estimate_tokens(text) for text in texts),
            standing,
            lambda answers: sum(answer.prompt_tokens or 0 for answer in answers),
            control,
        )

    async def _persist(
        self,
        once: Callable[[], Awaitable[T | Failure]],
        tokens: float,
        standing: _Standing,
        used_tokens: Callable[[T], int],
        control: Patience | None,
    ) -> Outcome[T] | None:
        def is_stopped() -> bool:
            return standing.stopped is not None and control is None

        outcome = await persist(
            once,
            self._throttle,
            tokens,
            control or self._patience,
            is_stopped,
            used_tokens,
            first=control is not None,
            group=standing if control is None else None,
        )
        if outcome is not None and outcome.value is not None:
            standing.accepted, standing.refused = True, 0
            self._answered_at = time.monotonic()
        return outcome

    def _guarded(
        self, once: Callable[[], Awaitable[T | Failure]], clean: Callable[[str], str]
    ) -> Callable[[], Awaitable[T | Failure]]:
        async def guarded() -> T | Failure:
            try:
                return await once()
            # A reply may be anything; the SDK and what reads it may stumble over it in any way.
            except Exception as error:
                return failure_of(error, self._config["max_retry_after_s"], clean)

        return guarded

    async def _concerns_all(
        self, outcome: Outcome[Any], call: dict[str, Any], standing: _Standing
    ) -> bool:
        """Tell whether a failure is the endpoint's rather than the row's; then the call is over."""
        failure = outcome.failure
        assert failure is not None
        if standing.stopped is not None:
            return failure.alike or failure.retry is not Retry.NEVER
        if failure.retry is Retry.NEVER:
            if not failure.alike:
                return False
            standing.refused += 1
            # No row is at fault for a key or a quota.
            may_be_the_row = failure.code == "invalid_request"
            if standing.accepted and may_be_the_row and standing.refused < _SUSPICIOUS:
                return False
        elif self._answered_at >= outcome.first_sent:
            return False
        async with standing.checking:
            if standing.stopped is None and standing.checked_at < outcome.first_sent:
                with self._throttle.hold(standing):
                    standing.stopped = await self._check(outcome, call, standing)
                if standing.stopped is not None:
                    self._throttle.dismiss(standing)
        return standing.stopped is not None

    async def _check(
        self, seen: Outcome[Any], call: dict[str, Any], standing: _Standing
    ) -> EndpointError | None:
        """Send a request that nothing is wrong with but what is wrong with all."""
        assert seen.failure is not None
        row = ("", _CONTROL)
        # Where others were patient with a server that does not answer, once is enough.
        once = replace(self._patience, tries=1)
        patience = self._patience if seen.failure.retry is Retry.NEVER else once
        outcome: Outcome[Any] | None
        if call["output"]["type"] == "embedding":
            outcome = await self._vectors([row], call, standing, control=patience)
        else:
            outcome = await self._complete(row, call, standing, control=patience)
        standing.refused = 0
        standing.checked_at = time.monotonic()
        assert outcome is not None
        failure = outcome.failure
        if failure is None:
            return None
        words = failure.message.rstrip(".")
        if failure.alike:
            return EndpointError(
                f"{self._where()} refuses every request: {words}. {_advice(failure)} "
                "What was answered before is stored; the refused requests are asked again by the "
                "next run."
            )
        if failure.retry is Retry.NEVER or seen.failure.retry is Retry.NEVER:
            return None
        return EndpointError(
            f"{self._where()} does not answer: {words} (after {seen.attempts} attempts "
            f"that ended with {seen.failure.code}). Check that the server runs and that base_url "
            "is right. What was answered before is stored; the next run asks for the rest."
        )

    def _where(self) -> str:
        return f"The endpoint {self._client.base_url} of model {self._config['model']}"

    def _note_length(self, answer: Answer) -> None:
        tokens = float(answer.completion_tokens or 0)
        known = self._length if self._length is not None else tokens
        self._length = known + _SMOOTHING * (tokens - known)


async def _in_trial(standing: _Standing, work: Callable[[], Awaitable[None]]) -> None:
    async with standing.trial:
        if not standing.accepted:
            await work()
            return
    await work()


def _failed(prompt_hash: str, outcome: Outcome[Any]) -> Answer:
    failure = outcome.failure
    assert failure is not None
    return Answer(
        prompt_hash,
        error_code=failure.code,
        error=failure.message,
        latency_s=outcome.latency_s,
        attempts=outcome.attempts,
    )


def _advice(failure: Failure) -> str:
    if failure.code == "auth":
        return "Check api_key or api_key_env of the LLM in the profile, and the key's rights."
    if failure.code == "rate_limited":
        return "Check the account's quota and billing."
    return (
        "Check model, base_url, max_tokens_parameter, structured_outputs and sampling of the LLM "
        "in the profile, and the options of the call (docs/endpoints.md lists what servers know)."
    )
