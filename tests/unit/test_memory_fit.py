"""What fits into memory, against figures worked out by hand and against vLLM's own log."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from dbt_llm.memory_fit import Fit, fit_of

GIB = 1024**3
# Of SmolLM2-135M-Instruct; its weights have 134,515,008 numbers.
SMOL = {
    "hidden_size": 576,
    "head_dim": 64,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
}


def write_weights(file: Path, tensors: dict[str, tuple[str, list[int], int]]) -> None:
    """Write a safetensors file; a tensor is its dtype, its shape and its bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + end)


def folder_of(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(
        folder / "model.safetensors",
        {"a": ("F32", [10, 7], 280), "b": ("F32", [5], 20)},
    )
    return folder


def fit(
    folder: Path, config: dict[str, Any] | None = None, dtype: str = "float32", **args: Any
) -> Fit:
    return fit_of(folder_of(folder, config or SMOL), args, dtype, 32)


def test_a_token_takes_what_the_formula_gives(tmp_path: Path) -> None:
    found = fit(tmp_path)
    assert found.kv_per_token == 2 * 30 * 3 * 64 * 4 == 46_080
    assert found.kv_words() == (
        "KV cache 45.0 KiB a token = 2 x 30 layers x 3 KV heads x 64 x 4 bytes"
    )
    assert found.max_model_len == found.longest == 8192


@pytest.mark.parametrize(("length", "concurrency"), [(2048, 45.50), (512, 182.00)])
def test_it_is_what_vllm_says(tmp_path: Path, length: int, concurrency: float) -> None:
    # vLLM 0.29 with this model, bfloat16, 2 GiB of cache and blocks of 32: "GPU KV cache size:
    # 93,184 tokens, Maximum concurrency for 2,048 tokens per request: 45.50x", 512: 182.00x.
    found = fit(tmp_path, dtype="bfloat16", max_model_len=length)
    assert found.tokens(2 * GIB) == 93_184
    assert found.sequences(2 * GIB) == int(concurrency)
    assert found.tokens(2 * GIB) / length == concurrency


def test_a_sequence_takes_whole_blocks(tmp_path: Path) -> None:
    found = fit(tmp_path, max_model_len=33)
    block = 32 * 46_080
    assert [found.sequences(blocks * block) for blocks in (1, 2, 3, 4)] == [0, 1, 1, 2]
    assert found.cache_words(2 * block).endswith(
        "64 tokens: 1 sequence of max_model_len = 33 at once"
    )


@pytest.mark.parametrize(
    ("args", "dtype", "kv", "weights"),
    [
        ({}, "float32", 4, 300),
        ({}, "bfloat16", 2, 150),
        ({}, "auto", 2, 150),
        ({"dtype": "float16"}, "float32", 2, 150),
        ({"dtype": "auto"}, "float32", 2, 150),
        ({"dtype": "float32"}, "auto", 4, 300),
        ({"kv_cache_dtype": "fp8"}, "float32", 1, 300),
        ({"kv_cache_dtype": "fp8_e4m3"}, "bfloat16", 1, 150),
        ({"kv_cache_dtype": "auto"}, "bfloat16", 2, 150),
        ({"kv_cache_dtype": "bfloat16"}, "float32", 2, 300),
        ({"quantization": "fp8"}, "bfloat16", 2, 300),
    ],
)
def test_the_width_of_numbers(
    tmp_path: Path, args: dict[str, Any], dtype: str, kv: int, weights: int
) -> None:
    found = fit_of(folder_of(tmp_path, SMOL), args, dtype, 32)
    assert found.kv_per_token == 2 * 30 * 3 * 64 * kv
    assert found.weights == weights


def without(config: dict[str, Any], *names: str, **more: Any) -> dict[str, Any]:
    return {**{name: value for name, value in config.items() if name not in names}, **more}


@pytest.mark.parametrize(
    ("config", "per_token"),
    [
        # Without them: as many KV heads as heads, and the head's size from the hidden one.
        (without(SMOL, "num_key_value_heads", "head_dim"), 2 * 30 * 9 * 64 * 4),
        (without(SMOL, num_key_value_heads=1, head_dim=None), 2 * 30 * 1 * 64 * 4),
        # GPT-2 names them otherwise.
        ({"n_layer": 12, "n_head": 12, "n_embd": 768, "max_position_embeddings": 9}, 73_728),
        # A model of texts and pictures.
        ({"text_config": SMOL, "num_hidden_layers": 2}, 46_080),
        # DeepSeek V3: 61 layers x (512 + 64).
        (without(SMOL, num_hidden_layers=61, kv_lora_rank=512, qk_rope_head_dim=64), 140_544),
    ],
)
def test_configs_of_other_models(tmp_path: Path, config: dict[str, Any], per_token: int) -> None:
    assert fit(tmp_path, config).kv_per_token == per_token


def test_lengths(tmp_path: Path) -> None:
    assert fit(tmp_path, max_model_len=100).max_model_len == 100
    # vLLM finds it out itself.
    assert fit(tmp_path, max_model_len=-1).max_model_len == 8192
    scaled = {**SMOL, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    assert fit(tmp_path, scaled).longest is None
    unknown = without(SMOL, "max_position_embeddings")
    assert fit(tmp_path, unknown, max_model_len=100).longest is None
    with pytest.raises(ValueError, match="set max_model_len in engine_args"):
        fit(tmp_path, unknown)


def test_weights_are_those_of_the_index(tmp_path: Path) -> None:
    folder_of(tmp_path, SMOL)
    (tmp_path / "consolidated.safetensors").write_bytes(b"0" * 5000)
    assert fit_of(tmp_path, {}, "float32", 32).weights == 300
    index = {"weight_map": {"a": "model.safetensors", "c": "second.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"1 of 2 weight files are missing, second\.safetensors"):
        fit_of(tmp_path, {}, "float32", 32)
    write_weights(tmp_path / "second.safetensors", {"c": ("I8", [4], 4), "d": ("BF16", [4], 8)})
    assert fit_of(tmp_path, {}, "float32", 32).weights == 300 + 4 + 16
    assert fit_of(tmp_path, {}, "bfloat16", 32).weights == 150 + 4 + 8


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\n", b"", b"abc"])
def test_what_is_no_weights_is_said(tmp_path: Path, content: bytes) -> None:
    folder_of(tmp_path, SMOL)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="is no safetensors file"):
        fit_of(tmp_path, {}, "float32", 32)


def test_half_of_a_file_is_said(tmp_path: Path) -> None:
    file = folder_of(tmp_path, SMOL) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="fetch it again"):
        fit_of(tmp_path, {}, "float32", 32)


def test_without_weights_or_layers_it_says_so(tmp_path: Path) -> None:
    folder_of(tmp_path, SMOL)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has no weights"):
        fit_of(tmp_path, {}, "float32", 32)
    with pytest.raises(KeyError, match="no num_hidden_layers or n_layer"):
        fit(tmp_path, without(SMOL, "num_hidden_layers"))
