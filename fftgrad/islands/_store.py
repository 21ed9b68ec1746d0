"""The requests of the protocol, and the stores that answer them.

Islands ask a store only to create an object if there is none of its key, whole or not at all, and
to read, list and remove objects. The protocol yields these requests as data. So it runs over any
store, in any order of its steps, and can be stopped at any of them. A test simulates a crash at
each.
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

from fftgrad._values import local_path, scheme_of

T = TypeVar("T")


class Create(NamedTuple):
    """Create an object if there is none of its key; the answer is whether there was none."""

    key: str
    data: bytes


class Read(NamedTuple):
    """Read an object; the answer is its bytes, or None if there is none."""

    key: str


class List(NamedTuple):
    """List the keys under a folder, which ends in a slash. New objects may be missing.

    Only keys that sort after `after` are wanted. The answer may have others.
    """

    folder: str
    after: str = ""


class Delete(NamedTuple):
    """Remove objects. They need not exist."""

    keys: tuple[str, ...]


class Wait(NamedTuple):
    """Let time pass."""

    seconds: float


class Clock(NamedTuple):
    """Read the clock, in seconds. The clocks of islands need not agree."""


Request: TypeAlias = Create | Read | List | Delete | Wait | Clock
Steps: TypeAlias = Generator[Request, Any, T]


def settle(key: str, data: bytes) -> Steps[bytes]:
    """Create an object; return its bytes, or those of an earlier writer.

    It can be repeated after a crash, and after an answer that was lost.
    """
    while not (yield Create(key, data)):
        if (found := (yield Read(key))) is not None:
            return found
        yield Wait(0.1)  # not visible yet, or removed since
    return data


class Store(Protocol):
    """Contract: what islands ask of a store. Keys are relative to the URL."""

    def create(self, key: str, data: bytes) -> bool:
        """Create an object if there is none; return whether it did. No reader sees a part of it."""
        ...

    def read(self, key: str) -> bytes | None:
        """The bytes of an object; None if there is none."""
        ...

    def list(self, folder: str, after: str = "") -> list[str]:
        """The keys under a folder, at least those after `after`."""
        ...

    def delete(self, keys: tuple[str, ...]) -> None:
        """Remove objects. They need not exist."""
        ...


def open_store(url: str, *, make: bool = True) -> Store:
    """Function: open the store at a URL.

    Args:
      url: a folder's path as it is, with `~` for the home folder, or file:///folder;
        s3://bucket/folder, gs://, az://, and what else obstore reads, with credentials as it finds
        them; memory://. In a URL, write "#" as %23 and "?" as %3F.
      make: whether to make a folder of this machine that is not there.

    Returns:
      A store with `create`, `read`, `list` and `delete`, which `Island` takes in place of a URL.

    Raises:
      ValueError: if the URL is none of a store.
      ImportError: if the extra is not installed.

    Example:
      >>> store = fg.islands.open_store("memory://")
      >>> store.create("a/b", b"first"), store.create("a/b", b"second"), store.read("a/b")
      (True, False, b'first')
    """
    if not isinstance(url, str) or not url:
        raise TypeError(f"open_store(url): must be text, got {url!r}; use 's3://bucket/run'.")
    scheme = scheme_of(url)
    if scheme and any(mark in "#?" or not mark.isprintable() for mark in url):
        raise ValueError(
            "open_store(url): must have no '#', '?' or control character, because two URLs that "
            f"differ in what follows would share a folder, got {url!r}; write %23 for '#' and %3F "
            "for '?', or pass a folder's path."
        )
    return FolderStore(url, make) if scheme in ("", "file") else ObjectStore(url)


UPLOADS = "uploads"
"""The folder in which objects are written before they get their names."""


class FolderStore:
    """A folder on a file system that has hard links.

    An object is written to a file of its own, synced to the disk, and then linked to its name. The
    link fails if the name exists. So after a power failure an object is whole, or not there. The
    local store of obstore links too, but it does not sync.
    """

    def __init__(self, url: str, make: bool = True) -> None:
        self._root = (
            _path(url) if scheme_of(url) else local_path("open_store(url)", url)
        ).absolute()
        try:
            if make:
                self._root.mkdir(parents=True, exist_ok=True)
            if not self._root.is_dir():
                raise FileNotFoundError("no such folder")
        except OSError as error:
            raise ValueError(
                f"open_store(url): must be that of a store, got {url!r} ({error}); use "
                "file:///folder, s3://bucket/folder or gs://bucket/folder."
            ) from None

    def create(self, key: str, data: bytes) -> bool:
        """Create an object if there is none."""
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
        _sync(target.parent)  # also of a faster writer: its object is obeyed from now on
        return is_new

    def read(self, key: str) -> bytes | None:
        """The bytes of an object."""
        try:
            return (self._root / key).read_bytes()
        except FileNotFoundError:
            return None

    def list(self, folder: str, after: str = "") -> list[str]:
        """The keys under a folder."""
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
        """Remove objects."""
        for key in keys:
            (self._root / key).unlink(missing_ok=True)

    def _make(self, folder: pathlib.Path) -> None:
        """Make a folder in the store, but not the store's own: its disk may not be mounted."""
        if folder.is_dir():
            return
        if folder == self._root:
            raise FileNotFoundError(f"no folder {folder}")
        self._make(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)


def _path(url: str) -> pathlib.Path:
    """The path of a file URL. It need not be UTF-8."""
    parts = urlsplit(url)
    if parts.netloc or not parts.path.strip("/"):
        raise ValueError(
            f"open_store(url): must have a folder's path, got {url!r}; use file:///folder."
        )
    return pathlib.Path(os.fsdecode(unquote_to_bytes(parts.path)))


def _sync(folder: pathlib.Path) -> None:
    """Sync the names in a folder to the disk, if the system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # of file systems that sync no folder
            raise
    finally:
        os.close(handle)


EXTRA = "run pip install -e '.[islands]' in the folder of the repository"


class ObjectStore:
    """A bucket, by obstore, or a store in the memory of the process."""

    def __init__(self, url: str) -> None:
        try:
            import obstore
            from obstore.exceptions import AlreadyExistsError, BaseError
            from obstore.store import MemoryStore, from_url
        except ImportError as error:
            raise ImportError(f"fftgrad.islands: needs obstore, got none; {EXTRA}") from error
        self._obstore, self._exists = obstore, AlreadyExistsError
        try:
            if urlsplit(url).scheme == "memory":
                self._store: Any = MemoryStore()
            else:
                self._store = from_url(url, retry_config={"max_retries": 0})  # Performer retries
        except (BaseError, OSError, ValueError) as error:
            raise ValueError(
                f"open_store(url): must be that of a store, got {url!r} ({_first_line(error)}); "
                "use file:///folder, s3://bucket/folder or gs://bucket/folder."
            ) from None

    def create(self, key: str, data: bytes) -> bool:
        """Create an object if there is none."""
        try:
            # obstore has no conditions for uploads in several parts
            self._obstore.put(self._store, key, data, mode="create", use_multipart=False)
        except self._exists:
            return False
        return True

    def read(self, key: str) -> bytes | None:
        """The bytes of an object."""
        try:
            return self._obstore.get(self._store, key).bytes().to_bytes()
        except FileNotFoundError:
            return None

    def list(self, folder: str, after: str = "") -> list[str]:
        """The keys under a folder."""
        batches = self._obstore.list(self._store, folder.rstrip("/"), offset=after or None)
        return [found["path"] for batch in batches for found in batch]

    def delete(self, keys: tuple[str, ...]) -> None:
        """Remove objects."""
        for key in keys:  # one request each: a missing one may fail all after it
            try:
                self._obstore.delete(self._store, key)
            except FileNotFoundError:
                continue


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


RETRIES = 5
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0

COUNTED: tuple[str, ...] = ("creates", "reads", "lists", "deletes", "written", "read")
"""Requests by kind, and bytes in both directions."""


class StoreError(ConnectionError):
    """A request that a store refused, or failed to answer several times."""


class Performer:
    """Runs steps of the protocol against a store, with retries.

    Attributes:
      traffic: number of requests by kind, and bytes in both directions.
    """

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
        """Run steps to their end, and return their result."""
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
        pause = FIRST_PAUSE
        for last in range(self._retries, -1, -1):
            try:
                return self._ask(request)
            except (TypeError, ValueError):
                raise
            except Exception as error:
                if _is_refusal(error) or not last:
                    name = type(request).__name__.lower()
                    raise StoreError(
                        f"store: must {name} {request[0]!r}, got {type(error).__name__}: "
                        f"{str(error).splitlines()[0] if str(error) else ''}; see whether it is "
                        "there, has room, and whether the credentials may read, write, list and "
                        "remove."
                    ) from error
            # random, so that islands that were cut off together do not retry together
            self._wait(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE)
        raise AssertionError

    def _ask(self, request: Request) -> Any:
        store, traffic = self._store, self.traffic
        if isinstance(request, Create):
            traffic["creates"] += 1
            traffic["written"] += len(request.data)
            return store.create(request.key, request.data)
        if isinstance(request, Read):
            traffic["reads"] += 1
            data = store.read(request.key)
            traffic["read"] += len(data or b"")
            return data
        if isinstance(request, List):
            traffic["lists"] += 1
            return store.list(request.folder, request.after)
        if isinstance(request, Delete):
            traffic["deletes"] += len(request.keys)
            return store.delete(request.keys)
        raise TypeError(f"no request: {request!r}")


def _is_refusal(error: Exception) -> bool:
    """Whether a retry would be refused too."""
    return isinstance(error, PermissionError) or type(error).__name__ in (
        "PermissionDeniedError",
        "UnauthenticatedError",
        "NotSupportedError",
        "InvalidPathError",
    )
