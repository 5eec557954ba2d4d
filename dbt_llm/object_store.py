"""Files in an object store: S3 and what speaks its protocol, Google Cloud Storage, Azure.

They go through obstore, which is the library that delta-rs uses, so one set of options opens the
data files and the log alike. A file appears whole with the request that ends its upload.
"""

import io
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dbt_llm.credentials import option, without_secrets
from dbt_llm.errors import ConfigError, StoreError
from dbt_llm.files import private_folder
from dbt_llm.storage import answer_code, fitting, leads_out, not_of_folder, reason

_CLIENT = {
    *("allow_http", "allow_invalid_certificates", "connect_timeout", "default_content_type"),
    *("http1_only", "http2_only", "http2_keep_alive_interval", "http2_keep_alive_timeout"),
    *("http2_keep_alive_while_idle", "pool_idle_timeout", "pool_max_idle_per_host", "proxy_url"),
    *("proxy_ca_certificate", "proxy_excludes", "randomize_addresses", "timeout", "user_agent"),
}
"""Options of the HTTP client."""
# What delta-rs knows beyond obstore; a typing error in any other option is found by obstore.
_ONLY_DELTA = re.compile(
    r"aws_s3_|.*dynamo|aws_force_credential_load|aws_profile|aws_iam_role|aws_sts|delta_|"
    r"object_store_|backoff_config|max_retries|retry_timeout"
)
_UNSAFE = re.compile(r"(aws_s3|mount)_allow_unsafe_rename", re.IGNORECASE)
_REFUSALS = {
    *("AccessDenied", "AuthenticationFailed", "AuthorizationFailure", "ExpiredToken"),
    *("InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch"),
}
_TAIL_BYTES = 64 * 1024
_AT_ONCE = 16
# A wrong address is to be found soon; what is under way may wait for minutes.
_PROBE_RETRIES = {"max_retries": 2, "retry_timeout": timedelta(seconds=15)}
_PROBE_TIMEOUT = "10s"

_proven: set[tuple[str, bool, frozenset[tuple[str, str]]]] = set()
"""The folders of this process that have been written to."""
_proving = threading.Lock()


class ObjectFolder:
    """A prefix of a bucket; see `Folder`."""

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        self._url = url.rstrip("/")
        self.options: Mapping[str, str] = dict(options)
        for key, value in options.items():
            if _UNSAFE.fullmatch(key) and value.lower() in {"true", "1"}:
                raise ConfigError(
                    f"storage_options has {key}, with which two runs at a time would lose answers. "
                    "Remove it; a store that refuses conditional puts can use store.format: "
                    "parquet."
                )
        self._objects = self._open()
        self._reached = False

    def __str__(self) -> str:
        return self._url

    @property
    def local(self) -> Path:
        """See `Folder`."""
        raise StoreError(f"{self} lies in an object store, and this needs a folder on a disk.")

    def address(self, name: str) -> str:
        """See `Folder`."""
        return f"{self._url}/{name}"

    def inside(self, name: str) -> "ObjectFolder":
        """See `Folder`."""
        return ObjectFolder(f"{self._url}/{name}", self.options)

    def names(self, pattern: str) -> list[str]:
        """See `Folder`."""
        return fitting(self._listed(), pattern)

    def sizes(self, pattern: str) -> dict[str, int]:
        """See `Folder`."""
        found = self._listed()
        return {name: found[name] for name in fitting(found, pattern)}

    def modified(self, name: str) -> float | None:
        """See `Folder`."""
        import obstore

        try:
            with self._errors(f"{name} cannot be looked up"):
                found: Any = obstore.head(self._objects, name)["last_modified"]
                return float(found.timestamp())
        except FileNotFoundError:
            return None

    def size(self, name: str) -> int | None:
        """See `Folder`."""
        import obstore

        try:
            with self._errors(f"{name} cannot be looked up", looking=True):
                return int(obstore.head(self._objects, name)["size"])
        except FileNotFoundError:
            return None

    def missing(self, names: Iterable[str]) -> list[str]:
        """See `Folder`; one request for a thousand files, where each file would take one."""
        names = list(names)
        there = self._listed() if names else {}
        return [name for name in names if name not in there]

    def check_names(self, names: Iterable[str]) -> None:
        """See `Folder`; there are no links here."""
        for name in names:
            if leads_out(name):
                raise not_of_folder(self, name)

    def source(self, name: str) -> "ObjectFile":
        """See `Folder`."""
        size = self.size(name)
        if size is None:
            raise FileNotFoundError(f"there is no {self.address(name)}")
        return ObjectFile(self, name, size)

    def read(self, name: str, start: int, length: int) -> bytes:
        """Return some bytes of a file."""
        import obstore

        with self._errors(f"{name} cannot be read"):
            return bytes(obstore.get_range(self._objects, name, start=start, length=length))

    def content(self, name: str) -> bytes:
        """See `Folder`."""
        import obstore

        with self._errors(f"{name} cannot be read"):
            return bytes(obstore.get(self._objects, name).bytes())

    def put(self, name: str, write: Callable[[Any], Any]) -> int:
        """See `Folder`."""
        import obstore

        buffer = io.BytesIO()
        write(buffer)
        size = buffer.tell()
        buffer.seek(0)
        with self._errors(f"{name} cannot be written"):
            obstore.put(self._objects, name, buffer)
        return size

    def delete(self, name: str) -> None:
        """See `Folder`."""
        import obstore

        with suppress(FileNotFoundError), self._errors(f"{name} cannot be removed"):
            obstore.delete(self._objects, name)

    def fetch(self, addresses: Sequence[str], into: Path, columns: list[str]) -> list[str]:
        """See `Folder`."""
        import pyarrow.parquet as pq

        if addresses:
            private_folder(into)

        def copy(address: str) -> str | None:
            name = address.rsplit("/", 1)[-1]
            path = into / name
            with suppress(FileNotFoundError):
                pq.write_table(pq.read_table(self.source(name), columns=columns), path)
                return str(path)
            return None

        with ThreadPoolExecutor(_AT_ONCE) as threads:
            return [path for path in threads.map(copy, addresses) if path is not None]

    def is_table(self) -> bool:
        """See `Folder`."""
        import obstore

        # It is the first thing that is asked, so what is wrong with a place is found here.
        objects = self._objects if self._reached else self._impatient()
        with self._errors("it cannot be listed", looking=True):
            pages = obstore.list(objects, prefix="_delta_log", chunk_size=1)
            found = any(True for _ in pages)
        self._reached = True
        return found

    def make_folder(self) -> None:
        """See `Folder`; here are none."""

    def make_writable(self, atomic: bool) -> None:
        """See `Folder`; it takes some requests, so it is done once in a process."""
        key = (self._url, atomic, frozenset(self.options.items()))
        with _proving:
            if key not in _proven:
                self._prove(atomic)
                _proven.add(key)

    def _prove(self, atomic: bool) -> None:
        import obstore
        from obstore.exceptions import AlreadyExistsError, BaseError, NotSupportedError

        objects = self._impatient()
        name = f"_write-test-{uuid.uuid4().hex}"
        refused = False
        try:
            if not atomic:
                obstore.put(objects, name, b"1", use_multipart=False)
            else:
                obstore.put(objects, name, b"1", mode="create", use_multipart=False)
                try:
                    obstore.put(objects, name, b"2", mode="create", use_multipart=False)
                except AlreadyExistsError:
                    refused = True
            obstore.list_with_delimiter(objects)
            if bytes(obstore.get(objects, name).bytes())[:1] not in {b"1", b"2"}:
                raise StoreError(f"{self} does not give back what it took.")
            obstore.delete(objects, name)
        except NotSupportedError:
            pass
        except (BaseError, OSError) as error:
            raise StoreError(
                f"{self} cannot be used: {self._reason(error)}. Nothing was asked. {_advice(error)}"
            ) from None
        self._reached = True
        if atomic and not refused:
            with suppress(BaseError, OSError):
                obstore.delete(objects, name)
            raise StoreError(
                f"{self} takes the same file twice: it does not know "
                "conditional puts (If-None-Match), so two runs at a time would lose answers in "
                "format delta. Nothing was asked. Use another object store or a newer version of "
                "this one, or format: parquet for the store, which does not need them."
            )

    def _impatient(self) -> Any:
        return self._open(_PROBE_RETRIES, _PROBE_TIMEOUT)

    def _listed(self) -> dict[str, int]:
        import obstore

        with self._errors("it cannot be listed", looking=True):
            found = obstore.list_with_delimiter(self._objects)["objects"]
            return {entry["path"]: int(entry["size"]) for entry in found}

    def _open(self, retries: Any = None, timeout: str | None = None) -> Any:
        try:
            from obstore.exceptions import BaseError
            from obstore.store import AzureStore, GCSStore, S3Store
        except ImportError:
            raise ConfigError(
                f"{self._url} needs the package obstore: pip install 'dbt-llm[object-stores]'."
            ) from None
        scheme, bucket, prefix = _parts(self._url)
        config: Any = {
            key.lower(): value
            for key, value in self.options.items()
            if not _ONLY_DELTA.match(key.lower())
        }
        client = {
            bare: config.pop(key)
            for key in list(config)
            if (bare := re.sub(r"^(aws|google|azure)_", "", key)) in _CLIENT
        }
        if timeout is not None:
            client["timeout"] = timeout
        arguments: dict[str, Any] = {
            "prefix": prefix or None,
            "client_options": client or None,
            "retry_config": retries or self._retries(),
        }
        try:
            if scheme == "gs":
                return GCSStore(bucket, config=config, **arguments)
            if scheme not in {"s3", "s3a"}:
                container, _, host = bucket.rpartition("@")
                if container:
                    config.setdefault("azure_storage_account_name", host.partition(".")[0])
                return AzureStore(container or bucket, config=config, **arguments)
            if not option(self.options, "access_key_id", "skip_signature"):
                arguments["credential_provider"] = _of_boto3(option(self.options, "profile"))
            return S3Store(bucket, config=config, **arguments)
        except (BaseError, ValueError) as error:
            raise ConfigError(
                f"{self._url} cannot be opened: {self._reason(error)}. Look at "
                "storage_options in the profile; docs/object-stores.md has those that are "
                "needed."
            ) from None

    def _retries(self) -> Any:
        lower = {key.lower(): value for key, value in self.options.items()}
        retries: dict[str, Any] = {}
        if "max_retries" in lower:
            retries["max_retries"] = int(lower["max_retries"])
        return retries or None

    @contextmanager
    def _errors(self, what: str, looking: bool = False) -> Iterator[None]:
        """Raise what obstore raises with a text that helps and holds no secret.

        An OSError like that of a disk, where a file is read or written; a StoreError where it is
        looked what is there, which no disk fails to say.
        """
        from obstore.exceptions import BaseError

        try:
            yield
        except FileNotFoundError:
            raise FileNotFoundError(f"{what}: there is no such file in {self}") from None
        except (BaseError, OSError) as error:
            words = f"{what}: {self._reason(error)}. {_advice(error)}"
            if looking:
                raise StoreError(f"{self} cannot be read: {words}") from None
            raise OSError(words) from None

    def _reason(self, error: BaseException) -> str:
        """Return what an object store answered in few words."""
        text = reason(str(error))
        return without_secrets(text, self.options)


class ObjectFile(io.RawIOBase):
    """A file of an object store, open for reading; its end, with a Parquet footer, is held."""

    def __init__(self, folder: ObjectFolder, name: str, size: int) -> None:
        super().__init__()
        self._folder = folder
        self._name = name
        self._size = size
        self._at = 0

    @cached_property
    def _tail(self) -> bytes:
        start = max(0, self._size - _TAIL_BYTES)
        return self._folder.read(self._name, start, self._size - start)

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def size(self) -> int:
        """Return the file's bytes."""
        return self._size

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Read from the position on; -1: to the end."""
        end = self._size if size is None or size < 0 else min(self._size, self._at + size)
        if end <= self._at:
            return b""
        tail_start = max(0, self._size - _TAIL_BYTES)
        if self._at >= tail_start:
            found = self._tail[self._at - tail_start : end - tail_start]
        else:
            found = self._folder.read(self._name, self._at, end - self._at)
        self._at = end
        return found

    def readall(self) -> bytes:
        """Read to the end."""
        return self.read()

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer as far as there is something left."""
        found = self.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)


def _parts(url: str) -> tuple[str, str, str]:
    """Return scheme, bucket and prefix."""
    parts = urlsplit(url)
    return parts.scheme, parts.netloc, parts.path.strip("/")


@cache
def _of_boto3(profile: str | None) -> Any:
    """Return what finds the credentials of `~/.aws`, where boto3 is there and finds any."""
    try:
        from boto3 import Session
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        return None
    session = Session(profile_name=profile)
    return Boto3CredentialProvider(session) if session.get_credentials() is not None else None


def _advice(error: BaseException) -> str:
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    code = answer_code(str(error))
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or code in _REFUSALS:
        return (
            "The credentials are wrong, or may not write, list, read and delete there. They come "
            "from storage_options, else from the profile's secrets, else from the "
            "environment; docs/object-stores.md says more."
        )
    if isinstance(error, FileNotFoundError) or code == "NoSuchBucket":
        return "Create the bucket, or change path in the profile."
    return (
        "Look whether the endpoint, the region and the credentials are right, and whether this "
        "machine reaches it; docs/object-stores.md says where they come from."
    )
