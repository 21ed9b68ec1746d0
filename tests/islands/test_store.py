"""Stores: one law for a folder, memory and S3."""

import concurrent.futures
import contextlib
import os
import pathlib
import threading
import time

import numpy as np
import pytest
from servers import seaweed

import fftgrad as fg
from fftgrad.islands import _store
from fftgrad.islands._store import Create, Delete, List, Performer, Read, StoreError


@contextlib.contextmanager
def folder(path):
    yield lambda: fg.islands.open_store(path.as_uri())


@contextlib.contextmanager
def memory(_):
    store = fg.islands.open_store("memory://")
    yield lambda: store


@contextlib.contextmanager
def s3(_):
    """Moto, a mock that has If-None-Match as S3 has it, if its requests run one at a time."""
    moto = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    lock = threading.Lock()

    class Atomic(moto.DomainDispatcherApplication):
        def __call__(self, *request):
            with lock:
                return super().__call__(*request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{moto.ThreadedMotoServer.__module__}.{Atomic.__base__.__name__}", Atomic)
        server = moto.ThreadedMotoServer(port=0, verbose=False)
        server.start()
    host, port = server.get_host_and_port()
    told = {
        "AWS_ENDPOINT": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in told.items():
                patch.setenv(name, value)
            client = boto3.client("s3", endpoint_url=told["AWS_ENDPOINT"], region_name="us-east-1")
            client.create_bucket(Bucket="bucket")
            yield lambda: fg.islands.open_store("s3://bucket/run")
    finally:
        server.stop()


@contextlib.contextmanager
def real(path):
    """A server in a process of its own."""
    with seaweed(path) as url:
        yield lambda: fg.islands.open_store(f"{url}/{path.name}")


SEAWEED = pytest.param(real, id="seaweed", marks=(pytest.mark.slow, pytest.mark.processes))
KINDS = [folder, memory, s3, SEAWEED]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def make(request, tmp_path):
    pytest.importorskip("obstore")
    with request.param(tmp_path) as make:
        yield make


def test_an_object_is_made_once_and_listed(make):
    store = make()
    assert store.read("a/b/c") is None
    assert list(store.list("a/")) == []
    assert store.create("a/b/c", b"first")
    assert not store.create("a/b/c", b"second")
    assert store.create("a/b/d", b"")
    assert store.create("ab", b"x")
    assert (store.read("a/b/c"), store.read("a/b/d")) == (b"first", b"")
    assert sorted(store.list("a/")) == ["a/b/c", "a/b/d"]
    assert "a/b/d" in store.list("a/", "a/b/c")
    store.delete(("a/b/c", "a/b/none"))
    assert store.read("a/b/c") is None
    assert store.create("a/b/c", b"third")


def test_of_many_at_once_one_wins(make):
    stores = [make() for _ in range(8)]
    start = threading.Barrier(len(stores))

    def create(number):
        start.wait()
        return stores[number].create("rounds/manifest", bytes([number]) * 1000)

    with concurrent.futures.ThreadPoolExecutor(len(stores)) as pool:
        won = list(pool.map(create, range(len(stores))))
    assert sum(won) == 1
    assert stores[0].read("rounds/manifest") == bytes([won.index(True)]) * 1000


def test_nobody_sees_a_part_of_an_object(make):
    writer, reader = make(), make()
    data = os.urandom(1 << 22)
    seen, done = [], threading.Event()

    def read():
        while not done.is_set():
            seen.append(reader.read("big/object"))

    thread = threading.Thread(target=read)
    thread.start()
    time.sleep(0.01)
    writer.create("big/object", data)
    done.set()
    thread.join()
    assert {None if one is None else len(one) for one in seen} <= {None, len(data)}
    assert reader.read("big/object") == data


def test_a_wrong_url_is_answered():
    """An end that a store drops would let two runs meet in one folder."""
    pytest.importorskip("obstore")
    for url in ("nonsense://x", "az://bucket/x", "sftp://host/folder"):
        with pytest.raises(ValueError, match="must be that of a store"):
            fg.islands.open_store(url)
    with pytest.raises(ValueError, match="empty"):
        fg.islands.open_store("")
    with pytest.raises(ValueError, match="no path of a folder"):
        fg.islands.open_store("file://")
    for end in ("#lr=0.1", "?lr=0.1", "\tlr"):
        with pytest.raises(ValueError, match="write # as %23"):
            fg.islands.open_store(f"s3://bucket/sweep{end}")


NAMES = ["a", "a#1", "a#2", "a?1", "a%31", "a%23", "a;1", "a\t1", "lr:1", "s3:a", "é", "%", "~a"]


def test_a_plain_path_is_the_folder_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        assert fg.islands.open_store(name).create("own", name.encode())
        for same in (str(tmp_path / name), (tmp_path / name).as_uri()):
            assert fg.islands.open_store(same).read("own") == name.encode()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(NAMES)


BOUNDS = 0.2, 0.4, 0.8


class Flaky:
    """A store whose first requests fail."""

    def __init__(self, fails, error=None):
        self.fails, self.error = fails, error or OSError("away")
        self.objects = {}

    def create(self, key, data):
        self._maybe()
        return self.objects.setdefault(key, data) is data

    def read(self, key):
        self._maybe()
        return self.objects.get(key)

    def list(self, folder, after=""):
        self._maybe()
        return list(self.objects)

    def delete(self, keys):
        self._maybe()

    def _maybe(self):
        self.fails -= 1
        if self.fails >= 0:
            raise self.error


def test_requests_are_tried_again_with_longer_pauses_and_counted():
    pauses = []
    performer = Performer(Flaky(3), wait=pauses.append)
    assert performer.run(iter_of(Create("a", b"123"))) is True
    assert len(pauses) == 3
    assert all(0.5 <= pause / bound <= 1 for pause, bound in zip(pauses, BOUNDS, strict=True))
    assert performer.run(iter_of(Read("a"))) == b"123"
    performer.run(iter_of(List("")))
    performer.run(iter_of(Delete(("a", "b"))))
    counted = {"creates": 4, "reads": 1, "lists": 1, "deletes": 2, "written": 12, "read": 3}
    assert performer.traffic == counted


def iter_of(request):
    return (yield request)


def test_a_store_that_stays_away_is_an_error():
    performer = Performer(Flaky(100), wait=bool)
    with pytest.raises(StoreError, match=r"must read 'a', got OSError: away; check that"):
        performer.run(iter_of(Read("a")))
    assert performer.traffic["reads"] == _store.RETRIES + 1


def test_what_is_forbidden_is_not_tried_again():
    performer = Performer(Flaky(100, PermissionError("no")), wait=bool)
    with pytest.raises(StoreError, match="credentials may read, write"):
        performer.run(iter_of(Create("a", b"")))
    assert performer.traffic["creates"] == 1


def test_an_object_of_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """And its name is before it is said to be made: the order that a power failure leaves."""
    told = []
    for name in ("fsync", "link"):
        real = getattr(os, name)

        def watched(*args, name=name, real=real):
            path = pathlib.Path(f"/proc/self/fd/{args[0]}").resolve() if name == "fsync" else None
            told.append(path.name if path else "link")
            return real(*args)

        monkeypatch.setattr(_store.os, name, watched)
    store = fg.islands.open_store(str(tmp_path / "run"))
    assert store.create("a/b", b"1")
    assert told[:2] == ["run", "run"]  # the folders made
    upload, *rest = told[2:]
    assert len(upload) == 32
    assert rest == ["link", "a"]


def test_an_object_that_did_not_come_to_the_disk_has_no_name(tmp_path, monkeypatch):
    def broken(_):
        raise OSError(5, "the disk is gone")

    store = fg.islands.open_store(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(_store.os, "fsync", broken)
        with pytest.raises(OSError, match="the disk is gone"):
            store.create("a/b", b"1")
    assert store.list("") == []
    assert store.create("a/b", b"1")


def test_a_folder_that_is_away_is_not_made(tmp_path):
    store = fg.islands.open_store(str(tmp_path / "run"))
    (tmp_path / "run").rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError):
        store.create("a/b", b"1")
    assert not (tmp_path / "run").exists()


class Replacing(Flaky):
    """A server that ignores the condition, and replaces what is there."""

    def create(self, key, data):
        self.objects[key] = data
        return True


def test_a_server_that_replaces_objects_is_refused_before_the_first_step():
    store = Replacing(0)
    with pytest.raises(ValueError, match="must keep existing objects"):
        fg.islands.Island(store, "a", np.zeros(3, np.float32))
    assert set(store.objects) == {"run.json"}
