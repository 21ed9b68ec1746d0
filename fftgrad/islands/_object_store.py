"""A folder or a bucket, by obstore.

It makes an object by a hard link of a complete file in a folder, by If-None-Match on S3 and Azure,
and by ifGenerationMatch on GCS.
"""

import pathlib
from typing import Any
from urllib.parse import unquote, urlsplit

EXTRA = "pip install 'fftgrad[islands]'"


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
        if parts.scheme == "file" and (parts.netloc or not parts.path.strip("/")):
            raise ValueError(
                f"open_store(url): must have a folder's path, got {url!r}; use file:///folder."
            )
        try:
            if parts.scheme == "memory":
                self._store: Any = MemoryStore()
            elif parts.scheme in ("", "file"):
                self._store = LocalStore(pathlib.Path(unquote(parts.path)).absolute(), mkdir=make)
            else:
                self._store = from_url(url, retry_config={"max_retries": 0})  # we do, and count
        except (BaseError, OSError, ValueError) as error:
            raise ValueError(
                f"open_store(url): must be that of a store, got {url!r} ({_first_line(error)}); "
                "use file:///folder, s3://bucket/folder, gs://bucket/folder or sftp://host/folder."
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
