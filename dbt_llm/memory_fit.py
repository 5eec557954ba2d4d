"""What of an LLM fits into memory: its weights, and the KV cache of how many sequences.

From the model's own files, by the usual rule: a token of a sequence takes 2 (key and value) x
layers x KV heads x head dimension x bytes of a number.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_GIB = 1024**3
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4, "fp8": 1}


@dataclass(frozen=True)
class Fit:
    """Sizes in bytes."""

    weights: int
    kv_per_token: int
    max_model_len: int

    @property
    def kv_per_sequence(self) -> int:
        """Of a sequence as long as the model takes."""
        return self.kv_per_token * self.max_model_len

    def sequences(self, kv_bytes: float) -> int:
        """Return how many sequences of `max_model_len` a KV cache of this size holds at once."""
        return int(kv_bytes // self.kv_per_sequence) if self.kv_per_sequence else 0

    def words(self, kv_bytes: float | None) -> str:
        """Return it as people read it."""
        text = (
            f"weights {self.weights / _GIB:.2f} GiB, KV cache {self.kv_per_token / 1024:.1f} KiB a "
            f"token, {self.kv_per_sequence / _GIB:.2f} GiB for {self.max_model_len:,} tokens"
        )
        if kv_bytes is not None:
            text += (
                f"; {kv_bytes / _GIB:.1f} GiB of cache hold {self.sequences(kv_bytes):,} such "
                "sequences at once"
            )
        return text


def fit_of(folder: Path, engine_args: dict[str, Any], dtype: str) -> Fit:
    """Read a folder of weights.

    `dtype` is what the engine computes with where neither `engine_args` nor the model says so.

    Raises:
        OSError, ValueError, KeyError: the folder has no config that tells.
    """
    config = json.loads((folder / "config.json").read_text())
    # Models of several kinds of input keep that of their text apart.
    config = {**config, **config.get("text_config", {})}
    files = [*folder.glob("*.safetensors")] or [*folder.glob("*.bin")]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    asked = str(engine_args.get("dtype", "auto"))
    if asked == "auto":
        asked = dtype
    cache = str(engine_args.get("kv_cache_dtype", "auto")).split("_")[0]
    width = _BYTES.get(cache, _BYTES.get(asked, 2))
    length = int(engine_args.get("max_model_len") or config.get("max_position_embeddings", 0))
    return Fit(
        weights=sum(file.stat().st_size for file in files),
        kv_per_token=2 * config["num_hidden_layers"] * kv_heads * head_dim * width,
        max_model_len=length,
    )
