"""Where objects are: a folder, a bucket, or an account on a server, by its URL.

Of a store only these are asked: to make an object if there is none of its key, whole or not at all,
and to read, list and remove objects. Folders and buckets are obstore's, which does the first by a
hard link of a complete file, and by If-None-Match on S3 and Azure and ifGenerationMatch on GCS.
"""

import pathlib
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

TIMEOUT = 30.0
"""Seconds that a request by SFTP may take; obstore's have as many."""

EXTRA = "pip install 'fftgrad[islands]'"


class Store(Protocol):
    """Contract: what islands ask of a store. Keys are relative to the URL."""

    def create(self, key: str, data: bytes) -> bool:
        """Makes an object if there is none; whether it did. Nobody ever sees a part of it."""
        ...

    def read(self, key: str) -> bytes | None:
        """The bytes of an object; None if there is none."""
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
      url: file:///folder, or a folder's path; s3://bucket/folder, gs://, az://, and what else
        obstore reads, with credentials as it finds them; memory://; sftp://user@host:port/folder,
        with the keys of the user's SSH agent and the hosts of known_hosts.
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
    scheme = urlsplit(url).scheme
    if scheme == "sftp":
        from fftgrad.islands._sftp import SftpStore  # only here: the rest works without paramiko

        return SftpStore(url)
    return ObjectStore(url, make)


class ObjectStore:
    """A folder or a bucket, by obstore."""

    def __init__(self, url: str, make: bool = True) -> None:
        try:
            import obstore
            from obstore.exceptions import AlreadyExistsError, BaseError
            from obstore.store import LocalStore, MemoryStore, from_url
        except ImportError as error:
            raise ImportError(f"fftgrad.islands: needs obstore, got none; {EXTRA}") from error
        self._obstore, self._exists = obstore, AlreadyExistsError
        self.url = url
        parts = urlsplit(url)
        try:
            if parts.scheme == "memory":
                self._store: Any = MemoryStore()
            elif parts.scheme in ("", "file"):
                self._store = LocalStore(pathlib.Path(unquote(parts.path)).absolute(), mkdir=make)
            else:
                self._store = from_url(url, retry_config={"max_retries": 0})  # we do, and count
        except (BaseError, OSError, ValueError) as error:
            raise ValueError(
                f"open_store(url): must be that of a store, got {url!r} ({_first_line(error)}); use "
                "file:///folder, s3://bucket/folder, gs://bucket/folder or sftp://host/folder."
            ) from None

    def create(self, key: str, data: bytes) -> bool:
        """Makes an object if there is none."""
        try:
            # In one request: obstore makes conditions on no upload in several parts.
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
        """Removes objects."""
        for key in keys:  # of a folder, one that is not there is an error for all after it
            try:
                self._obstore.delete(self._store, key)
            except FileNotFoundError:
                continue


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
