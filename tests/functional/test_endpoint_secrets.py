"""Keys, secret headers and prompts of an endpoint: where they must not be seen (report 20).

dbt runs in processes of its own, since what they print, write and keep is looked through.
"""

import json
import os
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from tests.endpoint import Endpoint, Reply, SeenRequest, error
from tests.project import Outcome, Project

IN_PROFILE = "sk-profile-Zq81mXw0"
BY_NAME = "sk-by-name-Vt54kRb2"
HEADER = "header-secret-Lp39cGs7"
QUERY = "query-secret-Nd62yHf5"
WRONG = "sk-wrong-Bw17eKj4"
SECRETS = (IN_PROFILE, BY_NAME, HEADER, QUERY, WRONG)

PROMPT = "the quick onyx goblin jumps over the lazy dwarf, no. "
QUOTED = "quick onyx goblin"

ENVIRONMENT = {
    "DBT_ENV_SECRET_LLM_KEY": IN_PROFILE,
    "LLM_KEY_BY_NAME": BY_NAME,
    "DBT_ENV_SECRET_LLM_HEADER": HEADER,
    "DBT_ENV_SECRET_LLM_QUERY": QUERY,
    "LLM_WRONG_KEY": WRONG,
}


def server(request: SeenRequest) -> Reply | None:
    """Repeat what was sent: keys in a 401, header and query in a 403, prompts in a 400."""
    key = request.headers.get("authorization", "")
    if WRONG in key:
        return error(401, f"Incorrect API key provided: {key}", "invalid_api_key")
    if request.prompt.endswith("no. 3"):
        return error(400, f"Invalid message: {request.prompt!r}", "content_filter")
    if request.prompt.endswith("no. 4"):
        words = f"Not you: {request.headers.get('x-secret')} {request.query} {key}"
        return error(403, words, "forbidden")
    return Reply(delay_s=0.2)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "a project")


def write_models(project: Project, endpoint: Endpoint) -> None:
    common = {
        "engine": "openai",
        "base_url": endpoint.base_url,
        "headers": {"X-Secret": "{{ env_var('DBT_ENV_SECRET_LLM_HEADER') }}"},
        "query": {"sig": "{{ env_var('DBT_ENV_SECRET_LLM_QUERY') }}"},
    }
    project.config["max_error_ratio"] = 0.5
    project.llms = {
        "default": {"api_key": "{{ env_var('DBT_ENV_SECRET_LLM_KEY') }}"},
        "named": {"api_key_env": "LLM_KEY_BY_NAME"},
        "refused": {"api_key_env": "LLM_WRONG_KEY"},
    }
    for llm in project.llms:
        # Models of their own, or else one's answers would do for the other.
        project.llms[llm] |= common | {"model": f"model-{llm}"}
        # A source, so that the prompt does not stand in SQL, which dbt logs.
        project.model(
            f"by_{llm}",
            f"select body, llm_generate(body, model := '{llm}') as r from read_json('texts.json')",
        )
    lines = [json.dumps({"body": f"{PROMPT}{i}"}) + "\n" for i in range(20)]
    project.write("texts.json", "".join(lines))


@dataclass
class Traces:
    """What a dbt process prints, and what all that it starts has in sight of others."""

    outcomes: list[Outcome] = field(default_factory=list)
    command_lines: set[str] = field(default_factory=set)
    sessions: set[Path] = field(default_factory=set)
    """Ray's folders."""

    def dbt(self, project: Project, *arguments: str) -> Outcome:
        """Run a dbt command and look at it while it runs."""
        with subprocess.Popen(
            project.command(*arguments),
            cwd=project.folder,
            env=os.environ | ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            watch = threading.Thread(target=self._watch, args=(psutil.Process(process.pid),))
            watch.start()
            try:
                log, _ = process.communicate(timeout=180)
            finally:
                process.kill()
                watch.join()
        self.outcomes.append(Outcome(process.returncode == 0, log))
        return self.outcomes[-1]

    def _watch(self, dbt: psutil.Process) -> None:
        with suppress(psutil.Error):
            while dbt.is_running() and dbt.status() != psutil.STATUS_ZOMBIE:
                for process in (dbt, *dbt.children(recursive=True)):
                    with suppress(psutil.Error):
                        self._note(process.cmdline())
                time.sleep(0.2)

    def _note(self, words: list[str]) -> None:
        self.command_lines.add(" ".join(words))
        for word in words:
            option, _, path = word.partition("=")
            if option in {"--session-dir", "--session_dir"} and path:
                self.sessions.add(Path(path))


def found(folder: Path, words: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the files that hold one of the words, and which; Parquet is read."""
    hits = []
    for path in folder.rglob("*"):
        # Sockets and pipes have nothing to read.
        if not path.is_file() or path.is_symlink():
            continue
        content = path.read_bytes()
        if path.suffix == ".parquet":
            content += json.dumps(pq.read_table(path).to_pylist(), default=str).encode()
        hits += [(str(path), word) for word in words if word.encode() in content]
    return hits


def test_no_secret_is_printed_or_written(project: Project) -> None:
    traces = Traces()
    with Endpoint(server) as endpoint:
        write_models(project, endpoint)
        log = traces.dbt(project, "--debug", "--log-format", "json", "run").log
        sent = {request.headers["authorization"]: request for request in endpoint.requests}
        assert set(sent) == {f"Bearer {key}" for key in (IN_PROFILE, BY_NAME, WRONG)}
        for request in sent.values():
            assert (request.headers["x-secret"], request.query) == (HEADER, {"sig": QUERY})
        traces.dbt(project, "--debug", "run")
        shown = traces.dbt(project, "debug").log
        traces.dbt(project, "ls")
    # The server's words are there, without what it repeats.
    assert "HTTP 401 invalid_api_key: Incorrect API key provided: Bearer ***" in log
    assert "HTTP 403 forbidden: Not you: *** {'sig': '***'} Bearer ***" in log
    assert "HTTP 400 content_filter: Invalid message: " in log
    # dbt shows the profile, and stars for variables that begin with DBT_ENV_SECRET_.
    assert "'api_key': '*****'" in shown
    assert "'api_key_env': 'LLM_KEY_BY_NAME'" in shown
    for outcome in traces.outcomes:
        assert [word for word in (*SECRETS, QUOTED) if word in outcome.log] == []

    assert found(project.folder, SECRETS) == []
    for path in (*project.folder.glob("logs/*"), *project.folder.glob("target/llm/logs/*")):
        assert QUOTED not in path.read_text(errors="replace"), path
    specs = sorted(path.name for path in project.folder.glob("target/llm/*.json"))
    assert specs == [f"model.my_project.by_{llm}.json" for llm in sorted(project.llms)]
    assert found(project.folder / "target" / "llm", (QUOTED,)) == []

    assert any(line.startswith("ray::EngineActor") for line in traces.command_lines)
    assert not any(word in line for line in traces.command_lines for word in (*SECRETS, QUOTED))
    assert len(traces.sessions) == 2
    for session in traces.sessions:
        assert found(session, ("EngineActor",))
        assert found(session, (*SECRETS, QUOTED)) == []

    # What was asked and answered stands in the store alone, and a failure does not repeat it.
    assert {word for _, word in found(project.store, (QUOTED, "echo "))} == {QUOTED, "echo "}
    assert project.generations("llm, count(*)", "status = 'ok' group by llm order by llm") == [
        ("default", 18),
        ("named", 18),
    ]
    messages = [message for (message,) in project.generations("error", "status = 'error'")]
    assert messages
    assert not any(QUOTED in message for message in messages)
