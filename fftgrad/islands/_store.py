"""Where objects are: a folder or a bucket, by its URL.

Of a store only these are asked: to make an object if there is none of its key, whole or not at all,
and to read, list and remove objects.
"""

from typing import Protocol

from fftgrad._values import scheme_of
from fftgrad.islands._folder import FolderStore
from fftgrad.islands._object_store import ObjectStore


class Store(Protocol):
    """Contract: what islands ask of a store. Keys are relative to the URL."""

    def create(self, key: str, data: bytes) -> bool:
        """Makes an object if there is none; whether it did. Nobody ever sees a part of it."""
        ...

    def read(self, key: str, most: int | None = None) -> bytes | None:
        """The bytes of an object; None if there is none. One of more than `most` is not read."""
        ...

    def list(self, folder: str, after: str = "") -> list[str]:
        """The keys under a folder, those after `after` at least."""
        ...

    def delete(self, keys: tuple[str, ...]) -> None:
        """Removes objects, which need not be there."""
        ...


def open_store(url: str, *, make: bool = True) -> Store:
    """Function: the store at a URL.

    Args:
      url: a folder's path as it is, with `~` for the home folder, or file:///folder;
        s3://bucket/folder, gs://, az://, and what else obstore reads, with credentials as it finds
        them; memory://. In a URL, write "#" as %23 and "?" as %3F.
      make: whether to make a folder of this machine that is not there.

    Returns:
      What has `create`, `read`, `list` and `delete`, as `Island` takes it in place of a URL.

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
