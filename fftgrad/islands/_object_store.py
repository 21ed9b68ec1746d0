"""A bucket, by obstore.

It makes an object by If-None-Match on S3 and Azure, and by ifGenerationMatch on GCS.
"""

from typing import Any
from urllib.parse import urlsplit

from fftgrad.islands._frame import TooLargeError

EXTRA = "run pip install -e '.[islands]' in the folder of the repository"


class ObjectStore:
    """A bucket, by obstore; or one in the memory of the process."""

    def __init__(self, url: str) -> None:
        try:
            import obstore
            from obstore.exceptions import AlreadyExistsError, BaseError
            from obstore.store import MemoryStore, from_url
        except ImportError as error:
            raise ImportError(f"fftgrad.islands: needs obstore, got none; {EXTRA}") from error
        self._obstore, self._exists = obstore, AlreadyExistsError
        self.url = url
        try:
            if urlsplit(url).scheme == "memory":
                self._store: Any = MemoryStore()
            else:
                self._store = from_url(url, retry_config={"max_retries": 0})  # we do, and count
        except (BaseError, OSError, ValueError) as error:
            raise ValueError(
                f"open_store(url): must be that of a store, got {url!r} ({_first_line(error)}); "
                "use file:///folder, s3://bucket/folder or gs://bucket/folder."
            ) from None

    def create(self, key: str, data: bytes) -> bool:
        """Makes an object if there is none."""
        try:
            # In one request: obstore makes conditions on no upload in several parts.
            self._obstore.put(self._store, key, data, mode="create", use_multipart=False)
        except self._exists:
            return False
        return True

    def read(self, key: str, most: int | None = None) -> bytes | None:
        """The bytes of an object."""
        try:
            found = self._obstore.get(self._store, key)  # whose bytes follow when they are asked
        except FileNotFoundError:
            return None
        if most is not None and found.meta["size"] > most:
            raise TooLargeError(found.meta["size"], most)
        return found.bytes().to_bytes()

    def list(self, folder: str, after: str = "") -> list[str]:
        """The keys under a folder."""
        batches = self._obstore.list(self._store, folder.rstrip("/"), offset=after or None)
        return [found["path"] for batch in batches for found in batch]

    def delete(self, keys: tuple[str, ...]) -> None:
        """Removes objects."""
        for key in keys:  # of several, one that is not there may be an error for all after it
            try:
                self._obstore.delete(self._store, key)
            except FileNotFoundError:
                continue


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
