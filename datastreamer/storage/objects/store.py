"""The object store: create, read, list and delete, each with retries.

Owns what an answer of the store means. An object is created once and never replaced; "exists" and
every lost answer are read back, so that a caller knows whose bytes are there. Knows no format.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timedelta
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from datastreamer.errors import (
    ArchiveDenied,
    ArchiveError,
    ArchiveMissing,
    ArchiveUnreachable,
    ArchiveUnsafe,
    BadArgument,
    ExtraMissing,
    StreamClosed,
)
from datastreamer.storage.objects import TIMEOUT, waits

try:
    import obstore
    import obstore.store
    from obstore import exceptions
except ImportError:
    raise ExtraMissing("archives need obstore, which is not installed", "archive") from None

SCHEMES = ("s3", "gs", "az", "file")

# Between two attempts, in seconds: doubled each time.
_PAUSE, _MOST_PAUSE = 0.1, 2.0
# Interval between looks whether the store is abandoned.
_LOOK_SECONDS = 0.2
_PROBE = b"Two creations of this object were tried, to see that the store accepts one.\n"

T = TypeVar("T")


class Backend(Protocol):
    """What obstore does with a store; the names are relative to the archive's URL."""

    def put(self, name: str, data: bytes) -> None:
        """Create it. Raises `exceptions.AlreadyExistsError`."""

    def get(self, name: str) -> bytes: ...
    def get_range(self, name: str, start: int, size: int) -> bytes | memoryview: ...
    def list(self, prefix: str, after: str | None) -> Iterator[Stored]: ...
    def delete(self, name: str) -> None: ...


class Stored(NamedTuple):
    """An object in a list."""

    name: str
    size: int
    modified: datetime


class ObstoreBackend:
    """A bucket, or a folder, through obstore."""

    def __init__(self, url: str, timeout: float) -> None:
        self._url = url
        self._options: dict[str, Any] = {}
        self._folder = unquote(urlsplit(url).path) if url.startswith("file:") else None
        if self._folder is None:
            plain = any(os.environ.get(name, "").startswith("http:") for name in _ENDPOINTS)
            self._options = {
                "client_options": {"timeout": timedelta(seconds=timeout), "allow_http": plain},
                "retry_config": {"max_retries": 1, "retry_timeout": timedelta(seconds=timeout)},
            }
            self._opened()

    @cache  # noqa: B019 - a store lives as long as its command
    def _opened(self) -> Any:
        """Of a folder that is missing: `FileNotFoundError`."""
        if self._folder is not None:
            os.stat(self._folder)
        return obstore.store.from_url(self._url, **self._options)

    def put(self, name: str, data: bytes) -> None:
        if self._folder is not None:
            os.makedirs(self._folder, exist_ok=True)
        obstore.put(self._opened(), name, data, mode="create", use_multipart=False)

    def get(self, name: str) -> bytes:
        return bytes(obstore.get(self._opened(), name).bytes())

    def get_range(self, name: str, start: int, size: int) -> memoryview:
        return memoryview(obstore.get_range(self._opened(), name, start=start, length=size))

    def list(self, prefix: str, after: str | None) -> Iterator[Stored]:
        for part in obstore.list(self._opened(), prefix, offset=after):
            for each in part:
                yield Stored(each["path"], each["size"], each["last_modified"])

    def delete(self, name: str) -> None:
        obstore.delete(self._opened(), name)


_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AZURE_STORAGE_ENDPOINT")


class Gone(Exception):
    """There is no such object, or no bucket (the store does not say which); or the object is
    shorter than it was."""


class Store:
    """The objects below one URL. Safe to use from several threads.

    Each call tries again for `timeout` seconds. Raises `ArchiveUnreachable` and `ArchiveDenied`.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = TIMEOUT,
        backend: Backend | None = None,
        abandoned: threading.Event | None = None,
    ) -> None:
        """`abandoned`: once it is set, nothing waits for an answer any more."""
        self.url = checked_url(url)
        self._timeout = timeout
        self._abandoned = abandoned or threading.Event()
        self.requests: Counter[tuple[str, str]] = Counter()
        """Attempts, by operation and outcome, as in `REQUESTS`."""
        try:
            self._backend = backend or ObstoreBackend(self.url, timeout)
        except _REFUSALS as error:
            raise self._explained("cannot be opened", error) from None

    def create(self, name: str, data: bytes) -> bool:
        """Put an object that was not there; whether it has these bytes now."""
        return self._tried("create", name, lambda: self._create(name, data))

    def _create(self, name: str, data: bytes) -> bool:
        try:
            self._backend.put(name, data)
        except _MISSING:
            what = "the bucket does not exist, or the folder cannot be made"
            raise ArchiveMissing(self.url, what) from None
        except _FINAL:
            raise
        except exceptions.BaseError as error:
            # It may be there, of this or of another writer.
            try:
                return self._backend.get(name) == data
            except _MISSING:
                raise exceptions.GenericError(f"{error}, and the object is not there") from None
        return True

    def get(self, name: str) -> bytes:
        """An object. Raises `Gone`."""
        return self._tried("get", name, lambda: self._backend.get(name))

    def get_range(self, name: str, start: int, size: int) -> bytes | memoryview:
        """Bytes of an object, which has them. Raises `Gone`."""

        def get() -> bytes | memoryview:
            try:
                found = self._backend.get_range(name, start, size)
                if len(found) != size:
                    raise exceptions.GenericError(f"{len(found)} bytes came instead of {size}")
            except exceptions.BaseError:
                # A range after the end is an error, too.
                if any(it.size < start + size for it in self._backend.list(name, None)):
                    raise exceptions.NotFoundError(name) from None
                raise
            return found

        return self._tried("get", name, get)

    def list(self, prefix: str, after: str | None = None) -> list[Stored]:
        """The objects whose names begin with `prefix`, in order, from those after one on.

        Raises `ArchiveMissing`.
        """

        def listed() -> list[Stored]:
            # (A folder shows what is being written.)
            return sorted(it for it in self._backend.list(prefix, after) if "#" not in it.name)

        try:
            return self._tried("list", prefix, listed)
        except Gone:
            raise ArchiveMissing(self.url, "the bucket or folder is missing") from None

    def delete(self, name: str) -> None:
        """Delete an object, or accept that it is deleted."""
        with suppress(Gone):
            self._tried("delete", name, lambda: self._backend.delete(name))

    def ensure_safe(self) -> None:
        """Raises `ArchiveUnsafe` if the store replaces an object when it should only create one."""
        name = f"probe-{os.urandom(8).hex()}"
        self.create(name, _PROBE)
        try:
            if self.create(name, _PROBE + b"2\n"):
                raise ArchiveUnsafe(
                    self.url,
                    "the store replaced an object that a writer may only create, so two writers "
                    "would destroy each other's work; use a store with conditional writes",
                )
        finally:
            self.delete(name)

    def _tried(self, operation: str, name: str, call: Callable[[], T]) -> T:
        """What one of several attempts returns."""
        waits.look()
        until, pause = time.monotonic() + self._timeout, _PAUSE
        while True:
            outcome = "failed"
            try:
                found = self._answer(call)
                outcome = "ok"
                return found
            except ArchiveMissing:
                raise
            except _MISSING:
                outcome = "missing"
                raise Gone(name) from None
            except _REFUSALS as error:
                if isinstance(error, _FINAL) or time.monotonic() + pause > until:
                    raise self._explained(name, error) from None
            finally:
                self.requests[operation, outcome] += 1
            waits.pause(pause)
            pause = min(2 * pause, _MOST_PAUSE)

    def _answer(self, call: Callable[[], T]) -> T:
        """What `call` returns, unless the store is abandoned first: a thread that waits for a store
        cannot be interrupted, and Python waits for the threads of an executor at its end."""
        found: list[T] = []
        failed: list[BaseException] = []
        answered = threading.Event()

        def ask() -> None:
            try:
                found.append(call())
            except BaseException as error:  # noqa: BLE001 - raised in the thread that asks
                failed.append(error)
            answered.set()

        threading.Thread(target=ask, name="archive store", daemon=True).start()
        while self._abandoned.is_set() or not answered.wait(_LOOK_SECONDS):
            if self._abandoned.is_set():
                raise StreamClosed(f"{self.url}: it was closed while it was used")
            waits.look()
        if failed and type(failed[0]).__module__ == "pyo3_runtime":
            # A fault of obstore's, as for an impossible port.
            raise exceptions.GenericError(str(failed[0])) from None
        if failed:
            raise failed[0]
        return found[0]

    def abandon(self) -> None:
        """Nothing waits for an answer any more: what does raises `StreamClosed`."""
        self._abandoned.set()

    def in_threads(
        self, count: int, work: Callable[..., T], *each: Iterable[Any]
    ) -> Generator[T, None, None]:
        """What `work` returns for each of these, in `count` threads.

        Work begins when the caller iterates, and is at most `2 * count` results ahead of it. A
        caller that may not take all of them closes this. An interruption within abandons the store.
        """
        ahead: deque[Future[T]] = deque()
        with ThreadPoolExecutor(count, "archive") as threads:
            try:
                for arguments in zip(*each, strict=False):
                    ahead.append(threads.submit(work, *arguments))
                    if len(ahead) == 2 * count:
                        yield ahead.popleft().result()
                while ahead:
                    yield ahead.popleft().result()
            except BaseException as error:
                threads.shutdown(wait=False, cancel_futures=True)
                if not isinstance(error, (Exception, GeneratorExit)):
                    self.abandon()
                raise

    def _explained(self, what: str, error: Exception) -> ArchiveError:
        if isinstance(error, _FINAL):
            return ArchiveDenied(
                self.url, f"the store refuses {what}: check credentials and rights ({_said(error)})"
            )
        return ArchiveUnreachable(self.url, f"{what}: {_said(error)}")


_MISSING = (exceptions.NotFoundError, FileNotFoundError)
_FINAL = (
    exceptions.PermissionDeniedError,
    exceptions.UnauthenticatedError,
    exceptions.NotSupportedError,
    exceptions.InvalidPathError,
    PermissionError,
)
_REFUSALS = (exceptions.BaseError, OSError, ValueError)


def checked_url(url: str) -> str:
    """The URL of an archive without a `/` at its end. Raises `BadArgument`."""
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    whole = parts.path.startswith("/") if parts.scheme == "file" else parts.netloc
    if parts.scheme not in SCHEMES or not whole or not url.startswith(f"{parts.scheme}://"):
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise BadArgument(f"{url!r} is not the URL of an archive, which begins with {known}")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise BadArgument(
            f"{parts.scheme}://...: the URL of an archive has no user, password or query; "
            "credentials come from the environment"
        )
    if parts.scheme == "file" and parts.netloc:
        raise BadArgument(f"{url!r}: a folder's URL has three slashes: file:///folder")
    return url.rstrip("/")


def _said(error: Exception) -> str:
    """What the store said, in one line, without what may hold secrets."""
    text = str(error).partition("\n\nDebug source:")[0]
    text = re.sub(r", after \d+ retries, max_retries: \d+, retry_timeout: \w+ *", " ", text)
    text = re.sub(r"https?://\S*?\?\S*", "...", " ".join(text.split()))
    text = re.sub(r"//[^/@\s]*@", "//", text)
    return text[:300] or type(error).__name__
