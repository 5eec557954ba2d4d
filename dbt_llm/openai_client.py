"""A client of the `openai` SDK, with an LLM entry's address, secrets, proxy and certificates."""

import contextlib
import importlib
import ssl
from typing import Any

from dbt_llm.config import OPENAI
from dbt_llm.errors import EngineError

_CONNECT_S = 15.0
_SHORTEST_SECRET = 4
_OTHER_DESCRIPTORS = 128


def import_openai() -> Any:
    """Return the SDK's module.

    Raises:
        EngineError: it is not installed; with what to install.
    """
    try:
        return importlib.import_module("openai")
    except ImportError as error:
        raise EngineError(
            f"The openai engine needs the openai SDK, which cannot be imported ({error}). "
            "Install it with pip install 'dbt-llm[openai]'."
        ) from error


def new_client(config: dict[str, Any], secrets: dict[str, Any]) -> Any:
    """Return an `AsyncOpenAI` that makes one attempt per request, and sets no time limit on it."""
    openai = import_openai()
    return openai.AsyncOpenAI(
        api_key=secrets["api_key"] or "unused",
        base_url=config["base_url"],
        default_headers={_header_name(name): text for name, text in secrets["headers"].items()},
        default_query=secrets["query"],
        max_retries=0,
        timeout=openai.Timeout(None, connect=_CONNECT_S),
        http_client=_http_client(config, secrets["proxy"]),
    )


def extra_arguments(config: dict[str, Any], secrets: dict[str, Any]) -> dict[str, Any]:
    """Return what to give to each request: headers that the SDK would send and we do not."""
    given = {name.lower() for name in secrets["headers"]}
    unwanted = []
    if not secrets["api_key"]:
        # Some servers refuse any key.
        unwanted.append("Authorization")
    if config["base_url"].rstrip("/") != OPENAI:
        # From the environment, and nobody else's business.
        unwanted += ["OpenAI-Organization", "OpenAI-Project"]
    omit = import_openai().Omit()
    omitted = {name: omit for name in unwanted if name.lower() not in given}
    return {"extra_headers": omitted} if omitted else {}


def most_connections(wanted: int) -> int:
    """Return how many connections this process may open, of those wanted; it may open more files.

    A connection takes a file descriptor, and the process needs some for other things.
    """
    try:
        import resource
    except ImportError:  # Windows, which has no such limit.
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft = raised
    return max(1, min(wanted, soft - _OTHER_DESCRIPTORS))


def to_mask(secrets: dict[str, Any]) -> list[str]:
    """Return what no message may show: secrets, and the last word of one like `Bearer abc`."""
    texts = [secrets["api_key"], secrets["proxy"]]
    texts += [*secrets["headers"].values(), *secrets["query"].values()]
    parts = {part for text in texts if text for part in (text, *text.split()[-1:])}
    # What is shorter is no secret, and would make holes in any message.
    return sorted((part for part in parts if len(part) >= _SHORTEST_SECRET), key=len, reverse=True)


def _header_name(name: str) -> str:
    # The SDK's own is spelled so; with another spelling some of its releases send both.
    return "Authorization" if name.lower() == "authorization" else name


def _http_client(config: dict[str, Any], proxy: str | None) -> Any:
    openai = import_openai()
    # The SDK's own HTTP library: httpx, and httpx2 since 3.0.
    clients = (kind.__module__ for kind in openai.DefaultAsyncHttpxClient.__mro__)
    http = importlib.import_module(next(name for name in clients if name.startswith("httpx")))
    verify: Any = True
    if config["ca_file"] is not None:
        verify = ssl.create_default_context(cafile=config["ca_file"])
    most = most_connections(config["max_concurrency"])
    return openai.DefaultAsyncHttpxClient(
        verify=verify,
        proxy=proxy,
        limits=http.Limits(max_connections=most, max_keepalive_connections=most),
    )
