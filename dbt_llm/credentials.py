"""What opens an object store: `storage_options`, the profile's secrets, or the environment.

All three become the options that delta-rs and obstore know. The first one that has credentials
counts; where none has any, both libraries look for those of the machine (an instance's role, say).
"""

import os
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

_CLOUDS = {
    "s3": "aws",
    "s3a": "aws",
    "gs": "google",
    "az": "azure",
    "azure": "azure",
    "abfs": "azure",
    "abfss": "azure",
}
SCHEMES = tuple(_CLOUDS)
"""Those of the object stores that can be used."""
_SECRET_TYPES = {"aws": "s3", "google": "gcs", "azure": "azure"}
_HIDDEN = ("secret", "token", "key", "signature", "sas", "password", "connection", "credential")
"""Options whose names hold one of these words have values that nobody may see."""
_LEAST_SECRET = 6

# Of each cloud: the options that are credentials, in any of their spellings without the prefix.
_CREDENTIALS = {
    "aws": {
        *("access_key_id", "secret_access_key", "session_token", "token", "skip_signature"),
        *("profile", "iam_role_arn", "web_identity_token_file"),
        *("container_credentials_relative_uri", "container_credentials_full_uri"),
    },
    "google": {
        *("service_account", "service_account_path", "service_account_key"),
        *("application_credentials", "skip_signature"),
    },
    "azure": {
        *("storage_account_key", "storage_access_key", "storage_master_key", "account_key"),
        *("access_key", "master_key", "storage_sas_key", "storage_sas_token", "sas_key"),
        *("sas_token", "storage_token", "token", "client_id", "storage_client_id"),
        *("client_secret", "storage_client_secret", "use_azure_cli", "skip_signature"),
        *("federated_token_file", "msi_endpoint", "identity_endpoint"),
    },
}
_FROM_ENVIRONMENT = {
    "aws": (
        *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION"),
        *("AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ALLOW_HTTP"),
        *("AWS_SKIP_SIGNATURE", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST"),
    ),
    "google": (
        *("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_SERVICE_ACCOUNT_KEY"),
        "GOOGLE_APPLICATION_CREDENTIALS",
    ),
    "azure": (
        *("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN"),
        *("AZURE_STORAGE_SAS_KEY", "AZURE_TENANT_ID", "AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET"),
        "AZURE_STORAGE_USE_EMULATOR",
    ),
}


def is_url(path: str) -> bool:
    """Tell whether a store's path names an object store."""
    return "://" in path


def storage_options(
    url: str,
    explicit: Mapping[str, str],
    secrets: Iterable[Mapping[str, Any]] = (),
    settings: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Return the options for a URL.

    Args:
        url: that of the store.
        explicit: `storage_options` of the profile.
        secrets: those of the profile: type, scope, provider and what else DuckDB knows.
        settings: the profile's DuckDB settings, of which the old `s3_...` count.
    """
    cloud = _CLOUDS[urlsplit(url).scheme]
    found: dict[str, str] = {}
    if not has_credentials(url, explicit):
        found = _of_secret(cloud, url, secrets)
        if not found and cloud == "aws":
            found = _of_settings(settings or {})
    environment = _of_environment(cloud)
    if has_credentials(url, found | dict(explicit)):
        # delta-rs and obstore take a region, say, from the environment, so DuckDB has to know it.
        environment = {
            key: value
            for key, value in environment.items()
            if _bare(cloud, key) not in _CREDENTIALS[cloud]
        }
    given = {_bare(cloud, key) for key in (*found, *explicit)}
    kept = {key: value for key, value in environment.items() if _bare(cloud, key) not in given}
    return kept | found | dict(explicit)


def has_credentials(url: str, options: Mapping[str, str]) -> bool:
    """Tell whether options hold credentials, and not only a region, say."""
    cloud = _CLOUDS[urlsplit(url).scheme]
    return not _CREDENTIALS[cloud].isdisjoint(_bare(cloud, key) for key in options)


def option(options: Mapping[str, str], *names: str) -> str | None:
    """Return the first option of S3 that is given, by its name without `aws_`."""
    given = {_bare("aws", key): value for key, value in options.items()}
    return next((given[name] for name in names if given.get(name)), None)


def without_secrets(text: str, options: Mapping[str, str]) -> str:
    """Return a text in which no value of a secret option is left."""
    values = {
        value for key, value in options.items() if any(word in key.lower() for word in _HIDDEN)
    }
    for value in sorted(values, key=len, reverse=True):
        # A shorter one is in every other word, and no secret.
        if len(value) >= _LEAST_SECRET:
            text = text.replace(value, "***")
    return text


def _bare(cloud: str, key: str) -> str:
    return key.lower().removeprefix(f"{cloud}_")


def _of_environment(cloud: str) -> dict[str, str]:
    # They are passed on, so that engines on other machines have them as well.
    return {name: os.environ[name] for name in _FROM_ENVIRONMENT[cloud] if os.environ.get(name)}


def _of_secret(cloud: str, url: str, secrets: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the options of the secret that DuckDB would use for a URL: that of the longest scope.

    Of a secret whose provider finds the credentials itself, only the rest is taken.
    """
    best: Mapping[str, Any] | None = None
    longest = -1
    for secret in secrets:
        if str(secret.get("type", "")).lower() != _SECRET_TYPES[cloud]:
            continue
        given = secret.get("scope")
        scopes = [given] if isinstance(given, str) else given or [""]
        # DuckDB compares it with the addresses of files.
        length = max((len(scope) for scope in scopes if f"{url}/".startswith(scope)), default=-1)
        if length > longest:
            best, longest = secret, length
    if best is None:
        return {}
    lower = {str(key).lower(): value for key, value in best.items() if value is not None}
    return _azure(lower) if cloud == "azure" else _s3(lower, url) if cloud == "aws" else {}


def _of_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    names = {"s3_access_key_id": "key_id", "s3_secret_access_key": "secret"}
    given = {
        names.get(key, key.removeprefix("s3_")): value
        for key, value in ((str(name).lower(), value) for name, value in settings.items())
        if key.startswith("s3_") and value is not None
    }
    return _s3(given, "s3://")


def _s3(given: Mapping[str, Any], url: str) -> dict[str, str]:
    """Translate what DuckDB's secrets of type s3 hold."""
    names = {
        "key_id": "AWS_ACCESS_KEY_ID",
        "secret": "AWS_SECRET_ACCESS_KEY",
        "session_token": "AWS_SESSION_TOKEN",
        "region": "AWS_REGION",
        "profile": "AWS_PROFILE",
    }
    options = {names[key]: str(value) for key, value in given.items() if key in names}
    endpoint = str(given.get("endpoint") or "")
    by_host = str(given.get("url_style", "")).lower() == "vhost"
    if endpoint and endpoint != "s3.amazonaws.com":
        plain = str(given.get("use_ssl", "true")).lower() in {"false", "0"}
        host = endpoint.rpartition("://")[2].rstrip("/")
        if by_host:
            host = f"{urlsplit(url).netloc}.{host}"
            options["AWS_VIRTUAL_HOSTED_STYLE_REQUEST"] = "true"
        options["AWS_ENDPOINT_URL"] = f"{'http' if plain else 'https'}://{host}"
        if plain:
            options["AWS_ALLOW_HTTP"] = "true"
    return options


def _azure(given: Mapping[str, Any]) -> dict[str, str]:
    """Translate what DuckDB's secrets of type azure hold."""
    names = {
        "account_name": "AZURE_STORAGE_ACCOUNT_NAME",
        "tenant_id": "AZURE_TENANT_ID",
        "client_id": "AZURE_CLIENT_ID",
        "client_secret": "AZURE_CLIENT_SECRET",
    }
    options = {names[key]: str(value) for key, value in given.items() if key in names}
    parts = {
        "AccountName": "AZURE_STORAGE_ACCOUNT_NAME",
        "AccountKey": "AZURE_STORAGE_ACCOUNT_KEY",
        "SharedAccessSignature": "AZURE_STORAGE_SAS_TOKEN",
        "BlobEndpoint": "AZURE_ENDPOINT",
    }
    for part in str(given.get("connection_string") or "").split(";"):
        key, _, value = part.partition("=")
        if key in parts:
            options[parts[key]] = value
    return options
