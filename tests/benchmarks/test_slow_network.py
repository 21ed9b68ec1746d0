"""The benchmark over slow links: they are slow, nothing is left behind, and twins match."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import jax
import numpy as np
import pytest
from processes import ROOT

FOLDER = ROOT / "benchmarks"
ADDRESS = "10.77.0.1"


def can_limit() -> bool:
    tools = ("ip", "tc", "unshare", "nsenter", "setpriv")
    if os.geteuid() != 0 or not all(map(shutil.which, tools)):
        return False
    return subprocess.run(["unshare", "--net", "true"], check=False).returncode == 0


limited = pytest.mark.skipif(not can_limit(), reason="needs root, iproute2 and util-linux")


def processes_with(text):
    """The ids of processes whose command line contains a text."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and text.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def eventually(condition, seconds=200.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def network_namespaces():
    found = set()
    for entry in pathlib.Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(entry.readlink())
        except OSError:
            continue
    return found


def interfaces():
    return pathlib.Path("/proc/self/net/dev").read_text().count(":")


# Namespaces

TALK = """
import socket, sys, time
turns, size = 5, 1_000_000
if sys.argv[1] == "send":
    with socket.create_connection((sys.argv[2], 5000)) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(turns):
            start = time.perf_counter()
            link.sendall(b"x")
            link.recv(1)
            print(time.perf_counter() - start)
        link.sendall(bytes(size))
        link.recv(1)
else:
    with socket.create_server((sys.argv[2], 5000)) as server:
        print("ready", flush=True)
        link, _ = server.accept()
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(turns):
            link.sendall(link.recv(1))
        start, got = time.perf_counter(), 0
        while got < size:
            got += len(link.recv(1 << 16))
        print(time.perf_counter() - start)
        link.sendall(b"x")
"""


def told(cluster, worker, *command):
    """What a command of a worker prints."""
    here = cluster.command(worker, list(command))
    return subprocess.run(here, stdout=subprocess.PIPE, text=True, check=True).stdout


def talk(cluster):
    """Seconds of the shortest turn of two workers, and of a transfer of 8 Mbit."""
    command = [sys.executable, "-c", TALK]
    there = cluster.command(0, [*command, "receive", cluster.address(0)])
    with subprocess.Popen(there, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "ready\n"
        turns = told(cluster, 1, *command, "send", cluster.address(0)).split()
        return min(map(float, turns)), float(other.stdout.read())


def has_rate(seconds, rate):
    """Whether the transfer took as long as it does, but for a bucket of a millisecond."""
    return 0.9 * 8e6 / rate < seconds + 0.002 < 10 * 8e6 / rate


@limited
def test_a_link_has_its_rate_and_its_bytes_are_counted(imported):
    """And the name of a worker's host is its address."""
    with imported("network").namespaces(2) as cluster:
        cluster.limit("200mbit")
        _, seconds = talk(cluster)
        counters = told(cluster, 1, "cat", "/proc/self/net/dev")
        assert told(cluster, 0, "hostname").strip() == cluster.address(0) == ADDRESS
    assert has_rate(seconds, 200e6)
    sent, packets = re.search(r"eth0: +(?:\d+ +){8}(\d+) +(\d+)", counters).groups()
    assert int(sent) == pytest.approx(1e6 + 66 * int(packets), rel=0.01)
    assert os.uname().nodename != ADDRESS


@limited
@pytest.mark.skipif(not os.access("/dev/net/tun", os.R_OK | os.W_OK), reason="needs /dev/net/tun")
def test_a_packet_has_its_delay_and_a_delayed_link_its_rate(imported):
    with imported("network").namespaces(2, "4ms") as cluster:
        cluster.limit("50mbit")
        turn, seconds = talk(cluster)
    assert 0.008 <= turn < 0.08  # there and back
    assert has_rate(seconds, 50e6)
    assert not processes_with(f"{cluster.hub}:port0")


HOLD = """
import sys
sys.path.insert(0, {folder!r})
import signal, subprocess, time
import network
# What a shell starts in the background ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)
with network.namespaces(2) as cluster:
    cluster.limit("10mbit")
    subprocess.Popen(cluster.command(1, ["sleep", {mark!r}]))
    print("up", flush=True)
    {then}
"""


@limited
@pytest.mark.parametrize("ending", ["leave", "raise", "SIGINT", "SIGTERM", "SIGKILL"])
def test_nothing_is_left_of_namespaces(ending):
    before, here = network_namespaces(), interfaces()
    mark = f"86400.{os.getpid()}{len(ending)}{sum(map(ord, ending))}"
    then = {"leave": "pass", "raise": "raise ValueError"}.get(ending, "time.sleep(60)")
    script = textwrap.dedent(HOLD).format(folder=str(FOLDER), mark=mark, then=then)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout.readline() == "up\n"
        if ending.startswith("SIG"):
            assert network_namespaces() - before
            parent.send_signal(getattr(signal, ending))
        parent.communicate(timeout=200)
    assert eventually(lambda: not processes_with(mark))
    # Other tests may have namespaces of their own: those of this one are what must go.
    assert eventually(lambda: not network_namespaces() - before)
    assert interfaces() == here


@limited
def test_what_is_tied_to_another_parent_does_not_start(imported):
    """As that of a parent that is gone by then, which the kernel would never kill."""
    command = imported("network").tied(["true"])
    assert subprocess.run(command, check=False).returncode == 0
    assert subprocess.run(["sh", "-c", '"$@"; exit $?', "sh", *command], check=False).returncode


# Runs


def start(tmp_path, *arguments):
    command = [sys.executable, str(FOLDER / "slow_network.py"), "--smoke", "--out", str(tmp_path)]
    environment = {k: v for k, v in os.environ.items() if k != "PJRT_NPROC"}
    return subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment | {"TMPDIR": str(tmp_path)},
    )


def results(tmp_path):
    return json.loads((tmp_path / "run.json").read_text())["runs"]


@pytest.mark.processes
def test_two_workers_train_alike_and_their_bytes_are_those_of_the_program(tmp_path):
    with start(tmp_path, "--method", "dense,muon-100x,muon-local-4") as job:
        output, _ = job.communicate(timeout=300)
    assert job.returncode == 0, output
    dense, filled, local = results(tmp_path)
    assert "100x, Muon" in output
    for run in (dense, filled, local):
        assert run["status"] == "done"
        assert len(run["seconds"]) == 5
        assert len(run["losses"]) == 5
        assert run["compute_s"] + run["update_s"] <= run["step_s"] * 1.2
    # The same parameters, the same batches.
    assert dense["losses"][0] == filled["losses"][0] == local["losses"][0]
    assert dense["losses"][-1] != filled["losses"][-1]
    assert dense["facts"]["link_bytes"] > 20 * filled["facts"]["link_bytes"]
    # Over loopback others may send too, so that only a lower bound is sure.
    headers = 66 * dense["sent_packets"]
    assert dense["sent_bytes"] >= 0.99 * dense["facts"]["link_bytes"] + headers
    assert local["every"] == 4
    assert 30 * local["facts"]["link_bytes"] < dense["facts"]["link_bytes"]
    assert not processes_with(str(tmp_path))


@pytest.mark.processes
@pytest.mark.parametrize("ending", ["SIGTERM", "SIGKILL"])
def test_no_worker_outlives_its_supervisor(tmp_path, ending):
    with start(tmp_path, "--method", "dense", "--steps", "5") as job:
        assert eventually(lambda: len(processes_with(f"{FOLDER}/worker.py")) >= 2)
        job.send_signal(getattr(signal, ending))
        job.communicate(timeout=300)
    # Workers name the folder of their job.
    assert eventually(lambda: not processes_with(str(tmp_path)))
    if ending != "SIGKILL":
        assert (tmp_path / "run.json").exists()
        assert not list(tmp_path.glob("tmp*"))


def test_a_step_is_the_mean_over_those_that_share_an_exchange(imported):
    run = imported("slow_network").Run("muon-local-4", "", every=4)
    steps = [{"step": i, "seconds": s} for i, s in enumerate([9, 9, 1, 1, 1, 5, 1, 1, 2, 6, 7])]
    run.lines = [steps]
    assert run.median("seconds", 2) == pytest.approx((2.0 + 2.5) / 2)  # what is over, is left out
    assert run.median("seconds", 9) == pytest.approx(6.5)


def test_runs_that_failed_are_in_no_table(imported, tmp_path, monkeypatch):
    links = imported("links")
    monkeypatch.setattr(links, "FOLDER", tmp_path)
    runs = [{"method": "a", "repeat": i, "status": s} for i, s in enumerate(["failed", "done"])]
    (tmp_path / "some.json").write_text(json.dumps({"settings": {"seed": 5}, "runs": runs}))
    assert links.turns("some") == {"a": {6: runs[1]}}


# Twins


def test_parameters_survive_their_file(imported, tmp_path):
    task, job = imported("tasks").TASKS["large"](True), imported("job")
    params = task.params(0)
    job.save_params(params, str(tmp_path / "params.npz"))
    loaded = job.load_params(str(tmp_path / "params.npz"))
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


@pytest.mark.slow
def test_models_in_both_frameworks_are_the_same_function(imported, tmp_path):
    torch = pytest.importorskip("torch")
    task = imported("tasks").TASKS["large"](True)
    params = task.params(0)
    path = str(tmp_path / "params.npz")
    imported("job").save_params(params, path)
    inputs = task.held_out[0][0][:3]
    expected = task.model.apply(params, inputs)
    as_tensor = torch.from_numpy(np.ascontiguousarray(inputs)).long()
    with torch.no_grad():
        got = imported("peer").twin(task, path)(as_tensor)
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-4)
