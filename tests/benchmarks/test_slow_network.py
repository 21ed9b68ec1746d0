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

TRANSFER = """
import socket, sys, time
size = 1_000_000
if sys.argv[1] == "send":
    with socket.create_connection((sys.argv[2], 5000)) as link:
        link.sendall(bytes(size))
        link.recv(1)
else:
    with socket.create_server((sys.argv[2], 5000)) as server:
        print("ready", flush=True)
        link, _ = server.accept()
        start, got = time.perf_counter(), 0
        while got < size:
            got += len(link.recv(1 << 16))
        print(time.perf_counter() - start)
        link.sendall(b"x")
"""


@limited
def test_a_link_has_its_rate_and_its_bytes_are_counted(imported):
    network = imported("network")
    with network.namespaces(2) as cluster:
        cluster.limit("200mbit")
        command = [sys.executable, "-c", TRANSFER]
        receive = cluster.command(0, [*command, "receive", cluster.address(0)])
        send = cluster.command(1, [*command, "send", cluster.address(0)])
        with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout.readline() == "ready\n"
            subprocess.run(send, check=True)
            seconds = float(receiver.stdout.read())
        counters = subprocess.run(
            cluster.command(1, ["cat", "/proc/self/net/dev"]),
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    # One bucket of a millisecond goes through at once.
    assert 0.9 * 8e6 / 200e6 < seconds + 0.002 < 10 * 8e6 / 200e6
    sent, packets = re.search(r"eth0: +(?:\d+ +){8}(\d+) +(\d+)", counters).groups()
    assert int(sent) == pytest.approx(1e6 + 66 * int(packets), rel=0.01)


ECHO = """
import socket, sys, time
if sys.argv[1] == "ask":
    with socket.create_connection((sys.argv[2], 5000)) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(5):
            start = time.perf_counter()
            link.sendall(b"x")
            link.recv(1)
            print(time.perf_counter() - start)
else:
    with socket.create_server((sys.argv[2], 5000)) as server:
        print("ready", flush=True)
        link, _ = server.accept()
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while letter := link.recv(1):
            link.sendall(letter)
"""


@limited
@pytest.mark.skipif(not os.access("/dev/net/tun", os.R_OK | os.W_OK), reason="needs /dev/net/tun")
def test_a_packet_has_its_delay_and_a_delayed_link_its_rate(imported):
    with imported("network").namespaces(2, "4ms") as cluster:
        cluster.limit("50mbit")
        seconds = {}
        for program, ask, answer in ((ECHO, "ask", "answer"), (TRANSFER, "send", "receive")):
            command = [sys.executable, "-c", program]
            there = cluster.command(0, [*command, answer, cluster.address(0)])
            here = cluster.command(1, [*command, ask, cluster.address(0)])
            with subprocess.Popen(there, stdout=subprocess.PIPE, text=True) as other:
                assert other.stdout.readline() == "ready\n"
                own = subprocess.run(here, check=True, stdout=subprocess.PIPE, text=True).stdout
                seconds[ask] = list(map(float, (own + other.stdout.read()).split()))
    assert 0.008 <= min(seconds["ask"]) < 0.08  # there and back
    assert 0.9 * 8e6 / 50e6 < seconds["send"][0] + 0.002 < 10 * 8e6 / 50e6
    assert not processes_with(f"{cluster.hub}:port0")


@limited
def test_a_host_name_is_an_address(imported):
    with imported("network").namespaces(1) as cluster:
        name = subprocess.run(
            cluster.command(0, ["hostname"]), capture_output=True, text=True, check=True
        ).stdout.strip()
        assert name == cluster.address(0) == ADDRESS
    assert os.uname().nodename != ADDRESS


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


def test_a_table_compares_with_the_dense_runs_of_the_same_turn(imported, tmp_path, monkeypatch):
    figures = imported("links")
    monkeypatch.setattr(figures, "FOLDER", tmp_path)

    def run(method, step, repeat=0):
        told = {"method": method, "label": f"a {method}", "repeat": repeat, "status": "done"}
        return told | {"step_s": step}

    first = [run("dense", 4.0), run("bf16", 2.0), run("top-k", 1.0)]
    again = [run("dense", 6.0, 1), run("top-k", 3.0, 1), run("bf16", 9.0, 1) | {"status": "failed"}]
    more = [run("dense", 6.0), run("top-k", 1.0)]
    for name, seed, runs in (("some", 0, first + again), ("some-2", 2, more), ("other", 0, first)):
        content = {"settings": {"seed": seed}, "runs": runs}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert figures.methods("some")["dense"]["step_s"] == 6.0
    table = figures.links_table({"one": "some", "two": "other"}).splitlines()
    assert table[2:] == [
        "| a dense | 6.00 (4.00-6.00) | 4.00 |",
        "| a bf16 | 2.00 | 2.00 |",
        "| a top-k | 1.00 (1.00-3.00); 4.0, 2.0 | 1.00; 4.0, 2.0 |",
    ]


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
