"""What of an LLM fits into memory: its weights, and the KV cache of how many sequences.

It is reckoned from the model's own files. By the usual rule, a token of a sequence takes 2 (key and
value) x layers x KV heads x head dimension x bytes of a number. Models with latent attention
(DeepSeek) keep one vector per layer instead, of `kv_lora_rank + qk_rope_head_dim` numbers. Models
of which some layers keep less (sliding windows, state space layers) take less than this.
"""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_GIB = 1024**3
_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2, "fp8": 1, "int8": 1}
_FLOATS = {"F32", "F16", "BF16"}
_LONGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class Fit:
    """Sizes in bytes."""

    weights: int
    """In memory, as the engine computes with them."""
    kv_per_token: int
    formula: str
    """How `kv_per_token` comes about."""
    max_model_len: int
    longest: int | None
    """The tokens that the model was made for; None where its config does not say."""
    block_size: int
    """The tokens that the engine gives room to at once."""

    def tokens(self, kv_bytes: float) -> int:
        """Return how many tokens a KV cache of this size holds, in whole blocks."""
        return self._blocks(kv_bytes) * self.block_size

    def sequences(self, kv_bytes: float) -> int:
        """Return how many sequences of `max_model_len` it holds at once."""
        return self._blocks(kv_bytes) // math.ceil(self.max_model_len / self.block_size)

    def _blocks(self, kv_bytes: float) -> int:
        return int(kv_bytes // (self.kv_per_token * self.block_size))

    def kv_words(self) -> str:
        """Return what a token takes, and how that comes about."""
        return f"KV cache {self.kv_per_token / 1024:,.1f} KiB a token = {self.formula}"

    def cache_words(self, kv_bytes: float) -> str:
        """Return what a KV cache of this size holds."""
        count = self.sequences(kv_bytes)
        return (
            f"{kv_bytes / _GIB:.1f} GiB of cache hold {self.tokens(kv_bytes):,} tokens: "
            f"{count:,} {'sequence' if count == 1 else 'sequences'} of max_model_len = "
            f"{self.max_model_len:,} at once"
        )


def longest_sequence(engine_args: dict[str, Any], of_model: Any) -> int | None:
    """Return how many tokens vLLM takes at most; None where that is not known here.

    `of_model` is what the model's own config says.
    """
    given = engine_args.get("max_model_len")
    try:
        length = -1 if given is None else int(given)
    except (TypeError, ValueError):
        # vLLM reads texts such as 8k, too.
        return None
    if length > 0:
        return length
    return None if of_model is None else int(of_model)


def fit_of(folder: Path, engine_args: dict[str, Any], dtype: str, block_size: int) -> Fit:
    """Read a folder of weights.

    `dtype` and `block_size` are what the engine takes where `engine_args` say nothing.

    Raises:
        OSError, ValueError, KeyError: the folder has no config or no weights that tell; the text
            says what is wrong.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    quantized = "quantization_config" in config or engine_args.get("quantization") is not None
    # Models of several kinds of input keep that of their text apart.
    config = {**config, **(config.get("text_config") or {})}
    asked = str(engine_args.get("dtype", dtype))
    # vLLM's "auto" takes 16 bits, also for weights of 32.
    width = _BYTES.get(asked, 2)
    per_token, formula = _kv_per_token(config, _kv_width(engine_args, width))
    longest = config.get("max_position_embeddings")
    # Where max_model_len is a text such as 8k, the model's own length is the best guess.
    length = longest_sequence(engine_args, longest) or int(longest or 0)
    if not length:
        raise ValueError("it has no max_position_embeddings; set max_model_len in engine_args")
    return Fit(
        weights=_weights(folder, None if quantized else width),
        kv_per_token=per_token,
        formula=formula,
        max_model_len=length,
        longest=None if longest is None or _is_scaled(config) else int(longest),
        block_size=int(engine_args.get("block_size") or block_size),
    )


def _kv_width(engine_args: dict[str, Any], width: int) -> int:
    cache = str(engine_args.get("kv_cache_dtype", "auto"))
    return _BYTES.get(cache, _BYTES.get(cache.split("_", maxsplit=1)[0], width))


def _kv_per_token(config: dict[str, Any], width: int) -> tuple[int, str]:
    layers = int(_first(config, "num_hidden_layers", "n_layer", "num_layers"))
    rank = config.get("kv_lora_rank")
    if rank:
        size = int(rank) + int(config.get("qk_rope_head_dim") or 0)
        return layers * size * width, f"{layers} layers x {size} x {width} bytes"
    heads = int(_first(config, "num_attention_heads", "n_head"))
    kv_heads = int(config.get("num_key_value_heads") or config.get("num_kv_heads") or heads)
    head_dim = config.get("head_dim")
    if not head_dim:
        head_dim = int(_first(config, "hidden_size", "n_embd", "d_model")) // heads
    formula = (
        f"2 x {layers} layers x {kv_heads} KV {'head' if kv_heads == 1 else 'heads'} x "
        f"{head_dim} x {width} bytes"
    )
    return 2 * layers * kv_heads * int(head_dim) * width, formula


def _first(config: dict[str, Any], *names: str) -> Any:
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise KeyError(f"its config.json has no {' or '.join(names)}")


def _is_scaled(config: dict[str, Any]) -> bool:
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return rope.get("rope_type", rope.get("type", "default")) not in {"default", None}


def _weights(folder: Path, width: int | None) -> int:
    """Return the bytes of all tensors; `width` is that of a number, None as it is in the files."""
    files = _weight_files(folder)
    if files and files[0].suffix != ".safetensors":
        return sum(file.stat().st_size for file in files)
    return sum(_tensor_bytes(file, width) for file in files)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ValueError(
                f"{len(missing)} of {len(names)} weight files are missing, {missing[0]} first"
            )
        return [folder / name for name in names]
    # Some models come in a second layout as well.
    plain = [file for file in folder.glob("*.safetensors") if "consolidated" not in file.name]
    files = sorted(plain or folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_*.bin"))
    if not files:
        raise ValueError("it has no weights (*.safetensors)")
    return files


def _tensor_bytes(file: Path, width: int | None) -> int:
    """Read a file's header: https://huggingface.co/docs/safetensors, "Format"."""
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= min(_LONGEST_HEADER, file.stat().st_size - 8):
            raise ValueError(
                f"{file.name} is no safetensors file; is its download complete, and no pointer of "
                "Git LFS?"
            )
        header = json.loads(stream.read(length))
    total = 0
    end = 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        first, last = tensor["data_offsets"]
        end = max(end, last)
        if width is not None and tensor["dtype"] in _FLOATS:
            total += math.prod(tensor["shape"]) * width
        else:
            total += last - first
    if file.stat().st_size != 8 + length + end:
        raise ValueError(
            f"{file.name} has {file.stat().st_size:,} bytes and should have {8 + length + end:,}; "
            "fetch it again"
        )
    return total
