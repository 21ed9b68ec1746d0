"""Requests of the protocol, and the stores that answer them.

Islands create objects atomically under unused keys, and read, list and remove objects. The protocol
yields each request as data. So tests can run the protocol on any store, and crash at any request.
"""

import errno
import os
import pathlib
import random
import secrets
import time
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar
from urllib.parse import unquote_to_bytes, urlsplit

from fftgrad._values import local_path, missing_extra, scheme_of

T = TypeVar("T")


class Create(NamedTuple):
    """Request to create an object. The answer is False if the key was used already."""

    key: str
    data: bytes


class Read(NamedTuple):
    """Request to read an object. The answer is its bytes, or None without such an object."""

    key: str


class List(NamedTuple):
    """Request to list the keys that start with `folder`, a text with a slash at its end.

    The answer may lack new objects. Keys up to `after` may be left out.
    """

    folder: str
    after: str = ""


class Delete(NamedTuple):
    """Request to remove objects, which need not exist."""

    keys: tuple[str, ...]


class Wait(NamedTuple):
    """Request to wait."""

    seconds: float


class Clock(NamedTuple):
    """Request for the time in seconds. The clocks of islands need not agree."""


Request: TypeAlias = Create | Read | List | Delete | Wait | Clock
Steps: TypeAlias = Generator[Request, Any, T]


def settle(key: str, data: bytes) -> Steps[bytes]:
    """Create an object and return its bytes. If the key is used, return the existing bytes.

    The call may be repeated after a crash or a lost answer.
    """
    while not (yield Create(key, data)):
        if (found := (yield Read(key))) is not None:
            return found
        yield Wait(0.1)  # the object is not visible yet, or was removed
    return data


class Store(Protocol):
    """Contract: an object store. Keys are relative to its URL."""

    def create(self, key: str, data: bytes) -> bool:
        """Create an object atomically and return True. If the key is used, return False."""
        ...

    def read(self, key: str) -> bytes | None:
        """Return the bytes of an object; None if it does not exist."""
        ...

    def list(self, folder: str, after: str = "") -> list[str]:
        """Return the keys under a folder. Keys up to `after` in sorted order may be left out."""
        ...

    def delete(self, keys: tuple[str, ...]) -> None:
        """Remove objects, which need not exist."""
        ...


def open_store(url: str, *, make: bool = True) -> Store:
    """Function: open the store at a URL.

    Args:
      url: the path of a folder, where `~` is the home folder, or one of file:///folder, memory://,
        s3://bucket/folder, gs://, az:// and the other schemes of obstore. obstore finds the
        credentials. In a URL, write "#" as %23 and "?" as %3F.
      make: True to create a local folder that does not exist.

    Returns:
      A store with `create`, `read`, `list` and `delete`, for `Island` and `status`.

    Raises:
      ValueError: if no store has this URL.
      ImportError: if the URL is not a local folder and the extra "islands" is not installed.

    Example:
      >>> store = fg.islands.open_store("memory://")
      >>> store.create("a/b", b"first"), store.create("a/b", b"second"), store.read("a/b")
      (True, False, b'first')
    """
    if not url:  # Path("") is the current folder, where an unset variable would start a run
        raise _url_error(url, "empty")
    scheme = scheme_of(url)
    # Stores ignore a URL from "#" or "?" on, so two runs would share a folder.
    if scheme and any(mark in "#?" or not mark.isprintable() for mark in url):
        raise _url_error(url, "write # as %23, ? as %3F, and no control characters")
    return FolderStore(url, make) if scheme in ("", "file") else ObjectStore(url)


def _url_error(url: str, reason: object) -> ValueError:
    return ValueError(
        f"open_store(url): must be that of a store, got {url!r} ({reason}); use file:///folder, "
        "s3://bucket/folder or gs://bucket/folder."
    )


UPLOADS = "uploads"
"""Folder of temporary files, before they are linked to their names."""


class FolderStore:
    """Store in a folder on a file system with hard links.

    An object is written to a temporary file, synced to the disk, and then linked to its name. The
    link fails if the name exists. So after a power failure, an object is complete or absent. The
    local store of obstore lacks this property, because it does not sync.
    """

    def __init__(self, url: str, make: bool = True) -> None:
        if scheme_of(url):
            parts = urlsplit(url)
            if parts.netloc or not parts.path.strip("/"):
                raise _url_error(url, "no path of a folder")
            root = pathlib.Path(os.fsdecode(unquote_to_bytes(parts.path)))  # need not be UTF-8
        else:
            root = local_path("open_store(url)", url)
        self._root = root.absolute()
        try:
            if make:
                self._root.mkdir(parents=True, exist_ok=True)
            if not self._root.is_dir():
                raise FileNotFoundError("no such folder")
        except OSError as error:
            raise _url_error(url, error) from None

    def create(self, key: str, data: bytes) -> bool:
        target, own = self._root / key, self._root / UPLOADS / secrets.token_hex(16)
        self._make(own.parent)
        self._make(target.parent)
        try:
            with own.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(own, target)
            is_new = True
        except FileExistsError:
            is_new = False
        finally:
            own.unlink(missing_ok=True)
        _sync(target.parent)  # even if another island was faster, because this island relies on it
        return is_new

    def read(self, key: str) -> bytes | None:
        try:
            return (self._root / key).read_bytes()
        except FileNotFoundError:
            return None

    def list(self, folder: str, after: str = "") -> list[str]:
        found: list[str] = []
        try:
            entries = list(os.scandir(self._root / folder))
        except FileNotFoundError:
            return found
        for entry in entries:
            key = f"{folder}{entry.name}"
            if not entry.is_dir():
                found.append(key)
            elif key != UPLOADS and (not after or f"{key}/" >= after[: len(key) + 1]):
                found += self.list(f"{key}/", after)
        return found

    def delete(self, keys: tuple[str, ...]) -> None:
        for key in keys:
            (self._root / key).unlink(missing_ok=True)

    def _make(self, folder: pathlib.Path) -> None:
        """Create a folder. Fail if the root of the store is missing: its disk may be unmounted."""
        if folder.is_dir():
            return
        if folder == self._root:
            raise FileNotFoundError(f"no folder {folder}")
        self._make(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)


def _sync(folder: pathlib.Path) -> None:
    """Sync the names in a folder to the disk, if the file system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # the system cannot sync folders
            raise
    finally:
        os.close(handle)


class ObjectStore:
    """Bucket accessed through obstore, or a store in the memory of this process."""

    def __init__(self, url: str) -> None:
        try:
            import obstore
            from obstore.exceptions import AlreadyExistsError, BaseError
            from obstore.store import MemoryStore, from_url
        except ImportError as error:
            raise missing_extra("fftgrad.islands", "obstore", "islands") from error
        self._obstore, self._exists = obstore, AlreadyExistsError
        try:
            if urlsplit(url).scheme == "memory":
                self._store: Any = MemoryStore()
            else:
                self._store = from_url(url, retry_config={"max_retries": 0})  # Performer retries
        except (BaseError, OSError, ValueError) as error:
            raise _url_error(url, _first_line(error)) from None

    def create(self, key: str, data: bytes) -> bool:
        try:
            # A multipart upload of obstore cannot fail for a used key.
            self._obstore.put(self._store, key, data, mode="create", use_multipart=False)
        except self._exists:
            return False
        return True

    def read(self, key: str) -> bytes | None:
        try:
            return self._obstore.get(self._store, key).bytes().to_bytes()
        except FileNotFoundError:
            return None

    def list(self, folder: str, after: str = "") -> list[str]:
        batches = self._obstore.list(self._store, folder.rstrip("/"), offset=after or None)
        return [found["path"] for batch in batches for found in batch]

    def delete(self, keys: tuple[str, ...]) -> None:
        for key in keys:  # one request each, because a missing object may fail a whole batch
            try:
                self._obstore.delete(self._store, key)
            except FileNotFoundError:
                continue


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


RETRIES = 5
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0

COUNTED: tuple[str, ...] = ("creates", "reads", "lists", "deletes", "written", "read")
"""Keys of the traffic: numbers of requests, bytes written and bytes read."""


class StoreError(ConnectionError):
    """Raised if a store refuses a request, or does not answer after all retries."""


class Performer:
    """Driver of the protocol: sends the requests to a store, with retries, and counts them."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], Any] = time.sleep,
        retries: int = RETRIES,
    ) -> None:
        self._store, self._clock, self._wait, self._retries = store, clock, wait, retries
        self.traffic: dict[str, int] = dict.fromkeys(COUNTED, 0)

    def run(self, steps: Steps[T]) -> T:
        """Answer the requests of a generator to the end, and return its result."""
        try:
            request = next(steps)
            while True:
                request = steps.send(self._answer(request))
        except StopIteration as end:
            return end.value
        finally:
            steps.close()

    def _answer(self, request: Request) -> Any:
        if isinstance(request, Clock):
            return self._clock()
        if isinstance(request, Wait):
            return self._wait(request.seconds)
        retries, pause = self._retries, FIRST_PAUSE
        while True:
            try:
                return self._ask(request)
            except (TypeError, ValueError):
                raise
            except Exception as error:
                if _is_refusal(error) or not retries:
                    name = type(request).__name__.lower()
                    raise StoreError(
                        f"store: must {name} {request[0]!r}, got {type(error).__name__}: "
                        f"{_first_line(error)}; check that the store exists and has room, and that "
                        "the credentials may read, write, list and remove."
                    ) from error
            # A random pause, so that islands do not all retry at the same time after an outage.
            self._wait(pause * random.uniform(0.5, 1.0))
            retries, pause = retries - 1, min(2 * pause, LONGEST_PAUSE)

    def _ask(self, request: Create | Read | List | Delete) -> Any:
        kind, traffic = type(request).__name__.lower(), self.traffic
        traffic[f"{kind}s"] += len(request.keys) if isinstance(request, Delete) else 1
        if isinstance(request, Create):
            traffic["written"] += len(request.data)
        answer = getattr(self._store, kind)(*request)  # a method of the same name and arguments
        if isinstance(request, Read):
            traffic["read"] += len(answer or b"")
        return answer


def _is_refusal(error: Exception) -> bool:
    """True if the store would refuse a retry too."""
    return isinstance(error, PermissionError) or type(error).__name__ in (
        "PermissionDeniedError",
        "UnauthenticatedError",
        "NotSupportedError",
        "InvalidPathError",
    )
