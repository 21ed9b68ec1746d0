"""A folder of this machine, or of a file system that several share."""

import errno
import os
import pathlib
import secrets
from urllib.parse import unquote_to_bytes, urlsplit

from fftgrad._values import local_path, scheme_of
from fftgrad.islands._frame import TooLargeError

UPLOADS = "uploads"
"""The folder, beside the objects, in which they are written before they get their names."""


class FolderStore:
    """A folder, whose file system has to have hard links.

    An object is written under a name of its own, brought to the disk, and then linked to its name,
    which fails where the name is there. So after a power failure it is whole, or not there. The
    local store of obstore also links, but it does not sync.
    """

    def __init__(self, url: str, make: bool = True) -> None:
        self.url = url
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
        """Makes an object if there is none."""
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
        _sync(target.parent)  # that of who was faster may not be on the disk yet, and is obeyed
        return is_new

    def read(self, key: str, most: int | None = None) -> bytes | None:
        """The bytes of an object."""
        try:
            with (self._root / key).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if most is not None and size > most:
                    raise TooLargeError(size, most)
                return file.read()
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
        """Removes objects."""
        for key in keys:
            (self._root / key).unlink(missing_ok=True)

    def _make(self, folder: pathlib.Path) -> None:
        """A folder in the store; never the store's own, which may be on a disk that is away."""
        if folder.is_dir():
            return
        if folder == self._root:
            raise FileNotFoundError(f"no folder {folder}")
        self._make(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)


def _path(url: str) -> pathlib.Path:
    """The path of a URL of a file, which need not be UTF-8."""
    parts = urlsplit(url)
    if parts.netloc or not parts.path.strip("/"):
        raise ValueError(
            f"open_store(url): must have a folder's path, got {url!r}; use file:///folder."
        )
    return pathlib.Path(os.fsdecode(unquote_to_bytes(parts.path)))


def _sync(folder: pathlib.Path) -> None:
    """Brings the names in a folder to the disk, where the system has a way."""
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
