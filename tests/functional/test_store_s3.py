"""The store in an object store: a real S3 server on this machine."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dbt_llm.cli import main
from dbt_llm.delta_extension import _shipped
from tests.project import Outcome, Project
from tests.s3_server import Careless, S3Server

MODEL = "select i, llm_generate('About ' || i) as answer from range(20) t(i)"
WRONG_ROWS = "select count(*) from answers where answer is distinct from made_up('About ' || i)"
Doctor = Callable[[int], str]
FORMATS = pytest.mark.parametrize("format_", ["delta", "parquet"])


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def cloud(
    project: Project, server: S3Server, request: pytest.FixtureRequest, monkeypatch: Any
) -> Project:
    """A project with one model, whose store has a prefix of its own and no credentials yet."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    project.model("answers", MODEL)
    prefix = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    project.config["store"] = {"path": f"s3://{server.bucket}/{prefix}"}
    return project


@pytest.fixture
def doctor(
    cloud: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Doctor:
    """Run dbt-llm doctor; return what it prints in one line."""

    def look(code: int) -> str:
        monkeypatch.chdir(cloud.folder)
        capsys.readouterr()
        assert main(["doctor", "--no-ray"]) == code
        return " ".join(capsys.readouterr().out.split())

    return look


def in_store(project: Project, server: S3Server, table: str = "generations") -> list[str]:
    """Return the names of a table's files."""
    prefix = project.config["store"]["path"].removeprefix(f"s3://{server.bucket}/")
    return [key.removeprefix(f"{prefix}/{table}/") for key in server.keys(f"{prefix}/{table}/")]


def asked(project: Project) -> list[str]:
    """Return the jobs that were begun; each writes its spec first."""
    return [path.name for path in (project.folder / "target" / "llm").glob("*.json")]


def secret_in_files(project: Project, secret: str) -> list[Path]:
    """Return the files of a project, less its profile, that hold a secret."""
    return [
        path
        for path in project.folder.rglob("*")
        if path.is_file() and path.name != "profiles.yml" and secret.encode() in path.read_bytes()
    ]


def with_httpfs(folder: Path) -> Path:
    """Install the extension, which DuckDB needs for the profile's own secrets; return where."""
    import duckdb

    where = folder / "extensions"
    connection = duckdb.connect(config={"extension_directory": str(where)})
    shipped = _shipped(connection, "httpfs")
    if not shipped:
        pytest.skip("there is no httpfs for this DuckDB")
    connection.execute(f"install '{shipped[0]}'")
    return where


def refused(project: Project, outcome: Outcome) -> str:
    """Return what a run says that failed before it asked anything."""
    assert not outcome.success
    assert asked(project) == []
    return outcome.log


@FORMATS
def test_a_run_stores_and_a_rerun_asks_nothing(
    cloud: Project, server: S3Server, format_: str
) -> None:
    cloud.config["store"] |= {"format": format_, "storage_options": server.options}
    first = cloud.dbt("run")
    assert first.summary("answers").startswith("20 prompts, 0 stored, 20 generated")
    assert cloud.query(WRONG_ROWS) == [(0,)]
    before = in_store(cloud, server)
    assert any(name.startswith("part-") for name in before)
    assert (f"_delta_log/{0:020d}.json" in before) == (format_ == "delta")
    assert not (cloud.folder / "s3:").exists()
    again = cloud.dbt("run")
    assert again.summary("answers") == "20 prompts, 20 stored, 0 generated"
    assert in_store(cloud, server) == before
    assert cloud.query(WRONG_ROWS) == [(0,)]
    code, printed = cloud.dbt_llm("report", "--json")
    report = json.loads(printed)
    assert code == 0
    assert [entry["asked"] for entry in report["invocations"]] == [0, 20]
    assert report["total"]["asked"] == report["stored"]["asked"] == 20
    assert len([name for name in in_store(cloud, server, "runs") if name[:5] == "part-"]) == 2
    assert secret_in_files(cloud, server.secret) == []
    assert server.secret not in first.log + again.log + printed


def test_answers_that_were_not_committed_are_taken_in(cloud: Project, server: S3Server) -> None:
    cloud.config["store"]["storage_options"] = server.options
    assert cloud.dbt("run").success
    prefix = cloud.config["store"]["path"].removeprefix(f"s3://{server.bucket}/")
    # What a run leaves that is killed between writing and its commit.
    server.delete(f"{prefix}/generations/_delta_log/{1:020d}.json")
    again = cloud.dbt("run")
    assert again.summary("answers") == "20 prompts, 20 stored, 0 generated"
    assert f"_delta_log/{1:020d}.json" in in_store(cloud, server)


def test_a_second_round_learns_from_the_store_and_asks_the_rest(
    cloud: Project, server: S3Server
) -> None:
    cloud.config["store"]["storage_options"] = server.options
    assert cloud.dbt("run").success
    cloud.model("answers", MODEL.replace("range(20)", "range(25)"))
    assert cloud.dbt("run").summary("answers").startswith("25 prompts, 20 stored, 5 generated")
    assert cloud.query(WRONG_ROWS) == [(0,)]
    code, printed = cloud.dbt_llm("plan", "--json")
    assert code == 0
    assert [call["to_ask"] for plan in json.loads(printed) for call in plan["calls"]] == [0]


def test_the_secrets_of_the_profile_open_it(cloud: Project, server: S3Server) -> None:
    other = {**server.duckdb_secret, "key_id": "other", "scope": "s3://lake/other"}
    cloud.output["secrets"] = [other, {**server.duckdb_secret, "scope": "s3://lake"}]
    cloud.output["config_options"] = {"extension_directory": str(with_httpfs(cloud.folder))}
    outcome = cloud.dbt("run")
    assert outcome.summary("answers").startswith("20 prompts, 0 stored, 20 generated")
    assert cloud.dbt("run").summary("answers") == "20 prompts, 20 stored, 0 generated"
    assert secret_in_files(cloud, server.secret) == []


def test_the_environment_opens_it(cloud: Project, server: S3Server, monkeypatch: Any) -> None:
    for name, value in server.options.items():
        monkeypatch.setenv(name, value)
    assert cloud.dbt("run").summary("answers").startswith("20 prompts, 0 stored, 20 generated")
    assert secret_in_files(cloud, server.secret) == []


@FORMATS
def test_wrong_credentials_are_found_before_anything_is_asked(
    cloud: Project, server: S3Server, format_: str
) -> None:
    wrong = {**server.options, "AWS_SECRET_ACCESS_KEY": "wrong-secret"}
    cloud.config["store"] |= {"format": format_, "storage_options": wrong}
    log = refused(cloud, cloud.dbt("run"))
    assert "SignatureDoesNotMatch" in log
    assert "The credentials are wrong" in log
    assert "wrong-secret" not in log


def test_a_bucket_that_is_not_there_is_found(cloud: Project, server: S3Server) -> None:
    cloud.config["store"] = {"path": "s3://no-such-bucket/x", "storage_options": server.options}
    log = refused(cloud, cloud.dbt("run"))
    assert "NoSuchBucket" in log
    assert "Create the bucket" in log


def test_a_server_that_is_not_there_is_found_soon(cloud: Project, server: S3Server) -> None:
    options = {**server.options, "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}
    cloud.config["store"]["storage_options"] = options
    log = refused(cloud, cloud.dbt("run"))
    assert "whether this machine reaches it" in log


def test_a_store_without_conditional_puts_is_found(cloud: Project, doctor: Doctor) -> None:
    with Careless() as careless:
        cloud.config["store"]["storage_options"] = {
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_ENDPOINT_URL": careless.url,
            "AWS_ALLOW_HTTP": "true",
        }
        log = refused(cloud, cloud.dbt("run"))
        assert "conditional puts (If-None-Match)" in log
        assert "format: parquet for the store" in log
        assert careless.objects == {}
        assert "conditional puts (If-None-Match)" in doctor(1)


def test_doctor_writes_to_it_and_says_what_it_holds(
    cloud: Project, server: S3Server, doctor: Doctor
) -> None:
    cloud.config["store"]["storage_options"] = server.options
    assert cloud.dbt("run").success
    printed = doctor(0)
    path = cloud.config["store"]["path"]
    assert f"{path} (delta) can be written, two commits at once do not pass" in printed
    assert "20 answers" in printed
    assert [name for name in in_store(cloud, server) if "write-test" in name] == []


def test_the_commands_of_the_store_work(cloud: Project, server: S3Server) -> None:
    cloud.config["store"]["storage_options"] = server.options
    assert cloud.dbt("run").success
    code, printed = cloud.dbt_llm("store", "stats", "--json")
    stats = json.loads(printed)
    assert (code, stats["answers"]) == (0, 20)
    assert [table["uncommitted_files"] for table in stats["tables"]] == [0, 0]
    assert [table["version"] for table in stats["tables"]] == [1, 1]
    code, printed = cloud.dbt_llm("store", "compact")
    assert code == 0, printed
    code, printed = cloud.dbt_llm("store", "vacuum", "--dry-run")
    assert code == 0, printed
    assert cloud.dbt("run").summary("answers") == "20 prompts, 20 stored, 0 generated"
