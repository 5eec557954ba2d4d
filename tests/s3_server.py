"""A real S3 server on this machine (moto), which checks signatures and knows conditional puts.

It runs in a process of its own: some calls of delta-rs hold Python's lock while they wait for it.
"""

import json
import re
import subprocess
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

_REGION = "us-east-1"
# Without the proxy variables of the environment.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class S3Server:
    """Serves the bucket `lake`, to whom has `key_id` and `secret`."""

    bucket = "lake"
    key_id = secret = url = ""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if (found := re.search(r"http://127\.0\.0\.1:\d+", line)) is not None:
                self.url = found[0]
                break
        # Its log must be read, or it would wait for that.
        threading.Thread(target=self._process.stderr.read, daemon=True).start()
        self._make_user()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def _make_user(self) -> None:
        anybody = {"aws_access_key_id": "any", "aws_secret_access_key": "any"}
        iam = _client("iam", self.url, **anybody)
        iam.create_user(UserName="dbt")
        key = iam.create_access_key(UserName="dbt")["AccessKey"]
        self.key_id, self.secret = key["AccessKeyId"], key["SecretAccessKey"]
        allowed = {"Effect": "Allow", "Action": "*", "Resource": "*"}
        iam.put_user_policy(
            UserName="dbt",
            PolicyName="all",
            PolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": [allowed]}),
        )
        # From now on requests need a signature.
        request = urllib.request.Request(
            f"{self.url}/moto-api/reset-auth", b"0", {"Content-Type": "text/plain"}
        )
        with _open(request):
            pass
        self.client = _client(
            "s3", self.url, aws_access_key_id=self.key_id, aws_secret_access_key=self.secret
        )
        self.client.create_bucket(Bucket=self.bucket)

    @property
    def options(self) -> dict[str, str]:
        """What opens it, as delta-rs knows it."""
        return {
            "AWS_ACCESS_KEY_ID": self.key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": _REGION,
        }

    @property
    def duckdb_secret(self) -> dict[str, Any]:
        """The same as a secret of dbt-duckdb's profile."""
        return {
            "type": "s3",
            "key_id": self.key_id,
            "secret": self.secret,
            "region": _REGION,
            "endpoint": self.url.removeprefix("http://"),
            "url_style": "path",
            "use_ssl": False,
        }

    def keys(self, prefix: str = "") -> list[str]:
        """List the bucket."""
        found = self.client.list_objects_v2(Bucket=self.bucket, Prefix=prefix)
        return [entry["Key"] for entry in found.get("Contents", [])]

    def delete(self, key: str) -> None:
        """Remove an object."""
        self.client.delete_object(Bucket=self.bucket, Key=key)


def _client(service: str, url: str, **credentials: str) -> Any:
    import boto3

    return boto3.client(service, endpoint_url=url, region_name=_REGION, **credentials)


class Careless:
    """An S3 server that overwrites whatever it is told not to: it ignores If-None-Match."""

    def __enter__(self) -> Self:
        objects: dict[str, bytes] = {}

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _reply(self, status: int, body: bytes = b"") -> None:
                self.send_response(status)
                self.send_header("ETag", '"1"')
                self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def do_PUT(self) -> None:
                length = int(self.headers["Content-Length"])
                objects[self.path.partition("?")[0]] = self.rfile.read(length)
                self._reply(200)

            def do_GET(self) -> None:
                if "list-type" in self.path:
                    self._reply(200, b"<ListBucketResult></ListBucketResult>")
                    return
                body = objects.get(self.path)
                self._reply(404) if body is None else self._reply(200, body)

            def do_DELETE(self) -> None:
                objects.pop(self.path, None)
                self._reply(204)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                keys = re.findall("<Key>(.*?)</Key>", body)
                for key in keys:
                    objects.pop(f"{self.path.partition('?')[0].rstrip('/')}/{key}", None)
                deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
                self._reply(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

            def log_message(self, *_: Any) -> None:
                pass

        self.objects = objects
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
