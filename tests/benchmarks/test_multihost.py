"""The example over several processes: they train as one does, and none outlives another."""

import re
import signal

import pytest
from processes import ROOT, free_port, running

pytestmark = pytest.mark.processes
SCRIPT = str(ROOT / "examples/multihost.py")
# A machine with other work may start a thread seconds late, so a heartbeat is not due after three.
ENDLESS = ["--steps", "1000000000", "--batch", "8", "--heartbeat", "25"]

FAILING = f"""
import runpy
import jax

load, calls = jax.make_array_from_process_local_data, []

def fail(*args):
    calls.append(1)
    if len(calls) == 3:
        raise OSError("the disk is gone")
    return load(*args)

jax.make_array_from_process_local_data = fail
runpy.run_path({SCRIPT!r}, run_name="__main__")
"""


PATIENCE = 60
"""Seconds in which the others have to end: more than ten times those that they take where nothing
else runs. Without an end of its own, the example takes 85."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


def by_hand(count, number, port):
    of = ["--coordinator", f"localhost:{port}", "--processes", str(count), "--process", str(number)]
    return of, {}


def slurm(count, number, port):
    """What srun sets of what JAX reads."""
    return [], {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(count),
        "SLURM_PROCID": str(number),
        "SLURM_LOCALID": str(number),
        "JAX_COORDINATOR_PORT": str(port),
    }


def start(folder, cache, count, launcher, arguments, programs=None):
    port = free_port()
    told = [launcher(count, number, port) for number in range(count)]
    programs = programs or [[SCRIPT]] * count
    commands = [[*p, *of, *arguments] for p, (of, _) in zip(programs, told, strict=True)]
    return running(folder, commands, [environment for _, environment in told], cache=cache)


def test_two_processes_end_with_the_bits_of_one(tmp_path, cache):
    said = {}
    for count in (2, 1):
        with start(tmp_path, cache, count, by_hand, ["--steps", "10", "--batch", "8"]) as processes:
            codes = [process.wait() for process in processes]
            assert codes == [0] * count, [process.err.read_text() for process in processes]
            said[count] = processes[0].out.read_text()
            assert "loss" not in "".join(process.out.read_text() for process in processes[1:])
    digests = {count: re.search(r"parameters ([0-9a-f]{64})\n", said[count])[1] for count in said}
    assert digests[1] == digests[2]
    losses = {count: re.findall(r"loss ([\d.]+)", said[count]) for count in said}
    assert [float(loss) for loss in losses[1]] == pytest.approx(
        [float(loss) for loss in losses[2]], abs=2e-4
    )
    assert len(losses[1]) == 2
    assert float(losses[1][1]) < float(losses[1][0])


def tells(process, victim):
    """Whether a survivor says that this one is gone, that a collective broke, or the coordinator.

    A collective breaks at once, unless the error reaches only one device of two and the other waits
    for that one. Process 0, the coordinator, may be the victim, or have ended before this survivor.
    """
    missed = rf"stopped sending heartbeats\):\n{victim}\n"
    broken = r"process \d of \d failed:\n[\s\S]*Gloo [\s\S]* failed"
    lost = "Failed to send RPC to coordination service. Either the leader task was preempted/died"
    return re.search(f"{missed}|{broken}|{lost}", process.err.read_text())


@pytest.mark.parametrize(
    ("launcher", "count", "victim"),
    [
        pytest.param(slurm, 2, 1, id="worker 1"),
        pytest.param(by_hand, 2, 0, id="worker 0"),
        pytest.param(by_hand, 4, 2, id="one of four", marks=pytest.mark.slow),
    ],
)
def test_the_others_end_when_one_is_killed(tmp_path, cache, launcher, count, victim):
    with start(tmp_path, cache, count, launcher, ENDLESS) as processes:
        assert processes[0].said("loss"), processes[0].err.read_text()
        processes[victim].popen.send_signal(signal.SIGKILL)
        for process in processes[:victim] + processes[victim + 1 :]:
            assert process.wait(PATIENCE) != 0
            assert tells(process, victim), process.err.read_text()


def test_the_others_end_when_one_fails(tmp_path, cache):
    with start(tmp_path, cache, 2, by_hand, ENDLESS, [[SCRIPT], ["-c", FAILING]]) as processes:
        assert processes[1].wait() == 1
        told = processes[1].err.read_text()
        assert "process 1 of 2 failed" in told
        assert "OSError: the disk is gone" in told
        assert processes[0].wait(PATIENCE) != 0
        assert tells(processes[0], 1), processes[0].err.read_text()


def last_loss(process):
    return float(re.findall(r"loss ([\d.]+)", process.out.read_text())[-1])


@pytest.mark.slow
def test_three_go_on_where_four_were_and_four_again(tmp_path, cache):
    """One of four is killed, three resume, then four: the loss is that of the unbroken run."""
    folder = str(tmp_path / "checkpoints")
    saving = ["--batch", "16", "--checkpoints", folder, "--every", "10"]

    def trained(count, steps, more):
        with start(tmp_path, cache, count, by_hand, ["--steps", steps, *more]) as processes:
            codes = [process.wait() for process in processes]
            assert codes == [0] * count, [process.err.read_text() for process in processes]
            return last_loss(processes[0]), processes[0].out.read_text()

    unbroken, _ = trained(4, "120", ["--batch", "16"])
    with start(tmp_path, cache, 4, by_hand, ["--steps", "1000000", *saving]) as processes:
        assert processes[0].said("step   40"), processes[0].err.read_text()
        processes[2].popen.send_signal(signal.SIGKILL)
        for process in processes[:2] + processes[3:]:
            assert process.wait(PATIENCE) != 0
            assert tells(process, 2), process.err.read_text()
    _, said = trained(3, "80", [*saving, "--resume"])
    assert re.search(r"from step [456]0, of 4 workers, with 3", said), said
    broken, said = trained(4, "120", [*saving, "--resume"])
    assert "from step 80, of 3 workers, with 4" in said, said
    assert abs(broken - unbroken) < 0.1, (broken, unbroken)
