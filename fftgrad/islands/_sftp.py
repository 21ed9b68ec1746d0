"""An account on a server, by SFTP."""

import contextlib
import getpass
import posixpath
import secrets
import stat
import threading
from typing import Any
from urllib.parse import unquote, urlsplit

from fftgrad.islands._folder import UPLOADS
from fftgrad.islands._frame import TooLargeError
from fftgrad.islands._object_store import EXTRA

TIMEOUT = 30.0
"""Seconds that a request may take."""

FSYNC = "fsync@openssh.com"
"""An extension of the protocol, which brings a file to the server's disk."""


class SftpStore:
    """A folder of a server, by paramiko.

    An object is written under a name of its own, brought to the server's disk where that is
    OpenSSH's, and then renamed. Version 3 of the protocol, which
    OpenSSH has, renames to no name that is there, and OpenSSH does so by a hard link where the file
    system has them. Where a server renames over what is there, as a few do, islands are not safe;
    the first object that is made finds that out.
    """

    def __init__(self, url: str) -> None:
        try:
            import paramiko
        except ImportError as error:
            raise ImportError(f"fftgrad.islands: needs paramiko, got none; {EXTRA}") from error
        self._paramiko, self.url = paramiko, url
        self._lock = threading.Lock()
        self._client: Any = None
        self._syncs: bool | None = None  # whether the server does, once that is known
        path = unquote(urlsplit(url).path, errors="surrogateescape")
        # The server resolves a relative path from the user's home folder.
        self._root = f"{path}/".removeprefix("/~/").rstrip("/") or "."

    def connect(self) -> Any:
        """A session on the server; a test has another one."""
        parts = urlsplit(self.url)
        if not parts.hostname:
            raise ValueError(
                f"open_store(url): must have a host, got {self.url!r}; use sftp://user@host/folder."
            )
        ssh = self._paramiko.SSHClient()
        ssh.load_system_host_keys()  # a host that is not known is refused
        ssh.connect(
            parts.hostname,
            parts.port or 22,
            unquote(parts.username) if parts.username else getpass.getuser(),
            timeout=TIMEOUT,
            banner_timeout=TIMEOUT,
            auth_timeout=TIMEOUT,
        )
        client = ssh.open_sftp()
        client.get_channel().settimeout(TIMEOUT)
        client.ssh = ssh  # which would be closed with the last name of it
        return client

    def create(self, key: str, data: bytes) -> bool:
        """Makes an object if there is none."""
        target, own = self._path(key), self._path(f"{UPLOADS}/{secrets.token_hex(16)}")

        def run(client: Any) -> bool:
            self._make_folder(client, posixpath.dirname(own))
            self._make_folder(client, posixpath.dirname(target))
            try:
                with client.open(own, "wx") as file:
                    file.set_pipelined(True)
                    file.write(data[:-1])
                    file.set_pipelined(False)  # then the answers to all writes are looked at
                    file.write(data[-1:])
                    self._sync(client, file)
            except OSError:  # such as of a full disk, which it would keep full
                with contextlib.suppress(OSError):
                    client.remove(own)
                raise
            try:
                client.rename(own, target)
            except OSError:
                client.remove(own)
                client.stat(target)  # if it is not there, the error is another one
                return False
            return True

        return self._run(run)

    def read(self, key: str, most: int | None = None) -> bytes | None:
        """The bytes of an object."""

        def run(client: Any) -> bytes | int | None:
            try:
                with client.open(self._path(key), "rb") as file:
                    size = file.stat().st_size
                    if most is not None and size > most:
                        return size
                    file.prefetch(size)
                    return file.read()
            except FileNotFoundError:
                return None

        found = self._run(run)
        if isinstance(found, int):
            raise TooLargeError(found, most or 0)
        return found

    def list(self, folder: str, after: str = "") -> list[str]:
        """The keys under a folder."""

        def walk(client: Any, folder: str) -> list[str]:
            try:
                entries = client.listdir_attr(self._path(folder))
            except FileNotFoundError:
                return []
            found: list[str] = []
            for entry in entries:
                key = f"{folder}{entry.filename}"
                if not stat.S_ISDIR(entry.st_mode):
                    found.append(key)
                elif not after or f"{key}/" >= after[: len(key) + 1]:
                    found += walk(client, f"{key}/")
            return found

        return self._run(lambda client: walk(client, folder))

    def delete(self, keys: tuple[str, ...]) -> None:
        """Removes objects."""

        def run(client: Any) -> None:
            for key in keys:
                try:
                    client.remove(self._path(key))
                except FileNotFoundError:
                    continue

        self._run(run)

    def _sync(self, client: Any, file: Any) -> None:
        """Brings a file to the server's disk, if it is one that does so."""
        if self._syncs is False:
            return
        try:
            client._request(self._paramiko.sftp.CMD_EXTENDED, FSYNC, file.handle)
        except OSError:
            if self._syncs:
                raise
            self._syncs = False
        else:
            self._syncs = True

    def _path(self, key: str) -> str:
        return posixpath.join(self._root, key.rstrip("/"))

    def _make_folder(self, client: Any, path: str) -> None:
        try:
            client.stat(path)
        except FileNotFoundError:
            if posixpath.dirname(path) not in ("", path):
                self._make_folder(client, posixpath.dirname(path))
            try:
                client.mkdir(path)
            except OSError:  # another island was faster
                client.stat(path)

    def _run(self, run: Any) -> Any:
        """By one session, one request at a time; after an error by another session."""
        with self._lock:
            try:
                if self._client is None:
                    self._client = self.connect()
                return run(self._client)
            except BaseException:
                client, self._client = self._client, None
                if client is not None:
                    self.disconnect(client)
                raise

    def disconnect(self, client: Any) -> None:
        """Ends a session."""
        client.close()
        client.ssh.close()
