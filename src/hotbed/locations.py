"""Open local paths and URIs of object stores and other file systems.

Object stores are read and written through obstore, because checkpoints and leases need atomic and conditional writes.
Parquet is read through pyarrow's file systems. Both have the same URIs, settings and retries (docs/preparing.md).
"""

# pyright: reportUnknownParameterType=false
from __future__ import annotations

import math
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal
from urllib.parse import parse_qsl, unquote, urlsplit

from typing_extensions import override

from hotbed.errors import RecipeError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3CredentialProvider

OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "abfs", "abfss")
"""Schemes of URIs that obstore opens."""
_MEMORY = "memory"
"""Scheme of a store in the process's own memory, for tests and examples."""
RETRY_S = 120.0
"""Time limit of retries of a request to an object store, in seconds, if ``HOTBED_RETRY_S`` is not set."""
CONDITIONAL_S = 20.0
"""Time limit of retries of a conditional write, in seconds, plus 2 s per MiB. With the last request it takes
at most 30 s, which is shorter than the TTL of a lease."""
_S3_KEYS = ("endpoint_override", "region", "scheme")


def location(text: str) -> str | Path:
    """Return a `Path` for a local path or a ``file://`` URI. Other URIs (``s3://…``) are returned as text."""
    if text.startswith("file://"):
        return Path(unquote(text.removeprefix("file://")))
    return text if "://" in text else Path(os.path.expanduser(text))  # noqa: PTH111 (an unknown user stays)


def is_storage(place: str | Path) -> bool:
    """Return whether checkpoints can be stored at a location. Data can also be read from others, e.g. ``hdfs://``."""
    return isinstance(place, Path) or place.partition("://")[0] in (*OBJECT_STORES, _MEMORY)


def local(option: str, text: str) -> Path:
    """Return a local path. Raise `RecipeError` with the name of the ``option`` if the text is a URI."""
    found = location(text)
    if isinstance(found, str):
        raise RecipeError(
            f"{option}: got {text}, expected a local path. See docs/preparing.md for options that may be URIs"
        )
    return found


def resolve_uri(uri: str) -> tuple[Any, str]:
    """Return the pyarrow file system of a URI and the path in it. Other protocols use fsspec in pyarrow's wrapper.

    Raise `ValueError` with the reason if no installed package can open the URI.
    """
    from pyarrow import ArrowInvalid, fs

    protocol = uri.partition("://")[0]
    if protocol in ("s3", "s3a"):
        place = _S3.of(uri)
        return place.filesystem(), f"{place.bucket}/{place.key}".rstrip("/")
    try:
        return fs.FileSystem.from_uri(uri)
    except ArrowInvalid as error:
        reason = str(error)
    except OSError as error:
        raise ValueError(f"{uri} cannot be opened: {_driver(protocol, error)}") from None
    try:
        import fsspec
    except ImportError:
        raise ValueError(
            f"{uri} cannot be opened: {reason}. pyarrow supports s3://, gs://, abfs:// and hdfs://. For other "
            "protocols: pip install fsspec"
        ) from None
    try:
        found, path = fsspec.core.url_to_fs(uri)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{uri} cannot be opened: {error}") from None
    return fs.PyFileSystem(fs.FSSpecHandler(found)), path


@dataclass(frozen=True)
class RemoteFile:
    """A file at a URI. It has the attributes of `Path` that readers need."""

    filesystem: Any
    path: str
    uri: str
    size: int
    """Size in bytes."""
    mtime_ns: int | None = None
    """Time of the last change, in nanoseconds since 1970. None if the file system does not report it."""

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rsplit("/", 1)[-1]

    def open(self, mode: Literal["rb"]) -> BinaryIO:
        """Open the file for random reads."""
        return self.filesystem.open_input_file(self.path)

    @override
    def __str__(self) -> str:
        return self.uri


def remote_files(uri: str) -> RemoteFile | list[RemoteFile] | None:
    """Return the file at a URI, or the files directly in its folder. Return None if the URI does not exist.

    Raise `ValueError` with the reason if no installed package can open the URI.
    """
    from pyarrow import fs

    filesystem, path = resolve_uri(uri)
    there = filesystem.get_file_info(path)
    if there.type == fs.FileType.NotFound:
        return None
    if there.is_file:
        return RemoteFile(filesystem, path, uri, there.size, there.mtime_ns)
    address, mark, query = uri.partition("?")
    return [
        RemoteFile(
            filesystem, file.path, f"{address.rstrip('/')}/{file.base_name}{mark}{query}", file.size, file.mtime_ns
        )
        for file in filesystem.get_file_info(fs.FileSelector(path))
        if file.is_file
    ]


def _driver(protocol: str, error: OSError) -> str:
    """Describe why a file system could not be loaded, and how to fix it."""
    reason = str(error).partition("\n")[0]
    if protocol in ("hdfs", "viewfs"):
        reason += (
            ". HDFS needs Java and Hadoop's native client: set JAVA_HOME, HADOOP_HOME and CLASSPATH (docs/preparing.md)"
        )
    return reason


def object_store(uri: str, most_s: float = math.inf) -> tuple[ObjectStore, str]:
    """Return obstore's store of a URI's bucket, and the path in it.

    Requests are retried for `retry_seconds`, but at most for ``most_s`` seconds. Raise `ValueError` with the reason if
    the URI is not valid, or obstore is not installed.
    """
    try:
        from obstore.exceptions import BaseError
        from obstore.store import GCSStore, S3Store, from_url
    except ImportError:
        raise ValueError(f"{uri} cannot be opened: object stores need obstore. pip install 'hotbed[remote]'") from None
    seconds = min(retry_seconds(), most_s)
    options: dict[str, Any] = {"client_options": _client(seconds), "retry_config": _retries(seconds)}
    parts = urlsplit(uri)
    protocol = parts.scheme
    s3 = _S3.of(uri) if protocol in ("s3", "s3a") else None
    if protocol == _MEMORY:
        return _memory(), _key(parts.netloc + parts.path)
    if s3 is None and parts.query:
        raise ValueError(f"{uri} cannot be opened: only s3:// has options in a URI. Set them in the environment")
    try:
        if s3 is not None:
            return S3Store(s3.bucket, **s3.config(), credential_provider=s3.credentials(), **options), s3.key
        if protocol in ("gs", "gcs"):
            return GCSStore(parts.netloc, **options), _key(parts.path)
        return from_url(f"{protocol}://{parts.netloc}", **options), _key(parts.path)
    except (BaseError, ValueError) as error:
        raise ValueError(f"{uri} cannot be opened: {cause(error)}") from None


@cache
def _memory() -> ObjectStore:
    from obstore.store import MemoryStore

    return MemoryStore()


def retry_seconds() -> float:
    """Return the time limit of retries of a request in seconds: ``HOTBED_RETRY_S``, or `RETRY_S`.

    Raise `ValueError` if ``HOTBED_RETRY_S`` is not a number of seconds below 10000.
    """
    given = os.environ.get("HOTBED_RETRY_S", "")
    if given and not re.fullmatch(r"\d{1,4}(\.\d+)?", given):
        raise ValueError(f"HOTBED_RETRY_S: got '{given}', expected a number of seconds below 10000")
    return float(given or RETRY_S)


def _retries(seconds: float) -> RetryConfig:
    return {
        "max_retries": 1000,  # the time is the limit
        "retry_timeout": timedelta(seconds=seconds),
        "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2},
    }


def _client(seconds: float) -> ClientConfig:
    timeout = timedelta(seconds=max(seconds / 2, 1.0))  # of one request without an answer
    return {"allow_http": True, "connect_timeout": timedelta(seconds=5), "timeout": timeout}


@dataclass(frozen=True)
class _S3:
    """The parts of a URI of S3 or of a store with the same protocol."""

    bucket: str
    key: str
    endpoint: str | None
    """URL with a scheme. None for Amazon's endpoint."""
    region: str | None

    @staticmethod
    def of(uri: str) -> _S3:
        parts = urlsplit(uri)
        query = dict(parse_qsl(parts.query))
        unknown = query.keys() - set(_S3_KEYS)
        if unknown:
            raise ValueError(
                f"{uri} cannot be opened: got option '{min(unknown)}', expected one of {', '.join(_S3_KEYS)}. Set "
                "other options of S3 in the environment (docs/preparing.md)"
            )
        _, at, bucket = parts.netloc.rpartition("@")
        if at:
            raise ValueError(
                f"{parts.scheme}://…@{bucket} contains keys, which reports and messages would show. Set "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or use a profile of ~/.aws"
            )
        if not bucket:
            raise ValueError(f"{uri} cannot be opened: it has no bucket. Write s3://BUCKET/PATH")
        own = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        endpoint = query.get("endpoint_override") or own
        if endpoint is not None and "://" not in endpoint:
            endpoint = f"{query.get('scheme', 'https')}://{endpoint}"
        return _S3(bucket, _key(parts.path), endpoint, query.get("region"))

    def filesystem(self) -> Any:
        """Return pyarrow's file system."""
        from pyarrow import fs

        options: dict[str, Any] = {}
        if self.endpoint is not None:
            scheme, _, address = self.endpoint.partition("://")
            options |= {"scheme": scheme, "endpoint_override": address}
        # The SDK waits up to 2^n seconds before try n, at most 20: set the number of tries to last retry_seconds().
        tries = fs.AwsStandardS3RetryStrategy(max_attempts=1 + int(retry_seconds()).bit_length())
        return fs.S3FileSystem(region=self._region(), retry_strategy=tries, connect_timeout=5, **options)

    def config(self) -> dict[str, str]:
        """Return obstore's settings. obstore reads other settings from the environment."""
        found = {"region": self._region()}
        if self.endpoint is not None:
            found["endpoint"] = self.endpoint
        return found

    def credentials(self) -> S3CredentialProvider | None:
        """Return the credentials of a profile in ``~/.aws``, which obstore reads through boto3.

        Return None if the environment has a key, or there is no profile.
        """
        files = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), "~/.aws/config"
        profile = "AWS_PROFILE" in os.environ or any(Path(file).expanduser().is_file() for file in files)
        if "AWS_ACCESS_KEY_ID" in os.environ or not profile:
            return None
        try:
            from boto3 import Session
            from botocore.exceptions import BotoCoreError
            from obstore.auth.boto3 import Boto3CredentialProvider
        except ImportError:
            raise ValueError("profiles of ~/.aws need boto3. pip install 'hotbed[remote]'") from None
        try:
            session = Session()
            return Boto3CredentialProvider(session) if session.get_credentials() is not None else None
        except BotoCoreError as error:
            raise ValueError(str(error)) from None

    def _region(self) -> str:
        given = self.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        if given:
            return given
        if self.endpoint is not None:
            return "us-east-1"
        from pyarrow import fs

        try:
            return fs.resolve_s3_region(self.bucket)
        except OSError as error:
            raise ValueError(
                f"the region of bucket {self.bucket} is not known ({cause(error)}). Set AWS_REGION, or add ?region=…"
            ) from None


def _key(path: str) -> str:
    return unquote(path).strip("/")


@contextmanager
def explain_storage_errors(what: str) -> Generator[None]:
    """Raise obstore's errors as `OSError`. The message names the file ``what`` and the cause."""
    from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{what} does not exist: {cause(error)}") from None
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise PermissionError(f"{what}: permission denied: {cause(error)}") from None
    except (BaseError, OSError, ValueError) as error:
        raise OSError(f"{what} could not be read or written: {cause(error)}") from None


def cause(error: Exception) -> str:
    """Extract one line with the cause from the long messages of object store clients."""
    text, _, details = str(error).partition("\n\nDebug source")
    found = re.search(r"<Message>(.*?)</Message>", text, re.DOTALL) or re.search(r'message: "([^"]+)"', details)
    line = " ".join(text.partition("<?xml")[0].partition("\n")[0].split()).rstrip(": ")
    return f"{line} ({found[1]})" if found and found[1] not in line else line
