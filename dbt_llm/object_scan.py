"""How DuckDB reads a table that lies in an object store.

Where the extension `httpfs` is at hand, DuckDB reads S3 itself, with a temporary secret for this
table alone. Everywhere else it reads through Python: the folder is registered as a filesystem of
its own, which needs no extension and works with every object store.
"""

import threading
from typing import Any
from urllib.parse import urlsplit

from dbt_llm import sql
from dbt_llm.call import sha256_hex
from dbt_llm.credentials import option
from dbt_llm.delta_extension import load_extension
from dbt_llm.storage import Folder

_lock = threading.Lock()


def make_readable(connection: Any, folder: Folder) -> str:
    """Let a database read a folder; return what its files' names begin with in SQL."""
    url = str(folder)
    known = sha256_hex(repr((url, sorted(folder.options.items()))))[:16]
    secret = _secret(folder)
    if secret is not None and load_extension(connection, "httpfs"):
        # On the connection itself a failure would abort the transaction that is under way.
        with _lock, connection.cursor() as other:
            _create_secret(other, f"dbt_llm_{sha256_hex(url)[:16]}_{known}", secret)
        return url
    return _register(connection, folder, f"dbtllm{known}")


def reads_itself(address: str) -> bool:
    """Tell whether DuckDB reads what `make_readable` returned without Python."""
    return not urlsplit(address).scheme.startswith("dbtllm")


def _secret(folder: Folder) -> str | None:
    """Return what a secret is created from; None where its values are not known here."""
    url, options = str(folder), folder.options
    key_id = option(options, "access_key_id")
    secret = option(options, "secret_access_key")
    if urlsplit(url).scheme != "s3" or key_id is None or secret is None:
        return None
    values = {"key_id": key_id, "secret": secret, "scope": f"{url}/"}
    token = option(options, "session_token", "token")
    if token is not None:
        values["session_token"] = token
    values["region"] = option(options, "region", "default_region") or "us-east-1"
    endpoint = option(options, "endpoint_url_s3", "endpoint_url", "endpoint")
    by_host = option(options, "virtual_hosted_style_request") in {"true", "1"}
    parts = urlsplit(endpoint or "")
    if endpoint is not None:
        host = parts.netloc + parts.path.rstrip("/")
        # delta-rs takes an endpoint with the bucket in it, DuckDB adds the bucket itself.
        values["endpoint"] = host.removeprefix(f"{urlsplit(url).netloc}.") if by_host else host
        values["url_style"] = "vhost" if by_host else "path"
    settings = ", ".join(f"{name} {sql.literal(value)}" for name, value in values.items())
    ssl = "false" if parts.scheme == "http" else "true"
    return f"(type s3, {settings}, use_ssl {ssl})"


def _create_secret(cursor: Any, name: str, secret: str) -> None:
    """Create a secret, unless it is there; one of the same folder with other values goes.

    A transaction that has begun does not see it, so it is made with a connection's first look.
    """
    of_folder = f"{name.rpartition('_')[0]}_"
    found = cursor.execute(
        f"select name from duckdb_secrets() where starts_with(name, {sql.literal(of_folder)})"
    ).fetchall()
    if (name,) in found:
        return
    for (other,) in found:
        cursor.execute(f"drop secret {sql.identifier(other)}")
    cursor.execute(f"create temporary secret {sql.identifier(name)} {secret}")


def _register(connection: Any, folder: Folder, protocol: str) -> str:
    # Other credentials make another filesystem; one that is there cannot be replaced.
    with _lock:
        if protocol not in connection.list_filesystems():
            connection.register_filesystem(_filesystem(folder, protocol))
    return f"{protocol}://store"


def _filesystem(folder: Folder, name: str) -> Any:
    import fsspec

    class StoreFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc]
        """What DuckDB asks of a filesystem; names are those of the folder's files."""

        protocol = name
        cachable = False

        def __init__(self) -> None:
            super().__init__()
            self._sizes: dict[str, int] = {}

        def open(self, path: str, mode: str = "rb", **_: Any) -> Any:
            """Open a file for reading."""
            if mode != "rb":
                raise OSError(f"{folder} is read only here")
            return folder.source(_name(path))

        def size(self, path: str) -> int:
            """Return a file's bytes."""
            # No file is ever written again.
            file = _name(path)
            if file not in self._sizes:
                found = folder.size(file)
                if found is None:
                    raise FileNotFoundError(f"there is no {folder.address(file)}")
                self._sizes[file] = found
            return self._sizes[file]

        def info(self, path: str, **_: Any) -> dict[str, Any]:
            """Describe a file."""
            return {"name": path, "size": self.size(path), "type": "file"}

        def exists(self, path: str, **_: Any) -> bool:
            """Tell whether a file is there."""
            return folder.size(_name(path)) is not None

        def isfile(self, path: str) -> bool:
            """Tell whether a file is there."""
            return self.exists(path)

        def modified(self, path: str) -> Any:
            """Return a time, always the same."""
            from datetime import UTC, datetime

            return datetime.fromtimestamp(0, UTC)

        def glob(self, path: str, **_: Any) -> list[str]:
            """Return the path itself: all are given by their names."""
            return [self._strip_protocol(path)]

    return StoreFileSystem()


def _name(path: str) -> str:
    return path.rsplit("/", 1)[-1]
