"""Islands in real processes, on a folder."""

import random
import time

import pytest
from processes import ROOT, free_port, running

pytest.importorskip("obstore")
pytestmark = pytest.mark.processes
PROGRAM = str(ROOT / "tests" / "island_program.py")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("programs")


def ends(processes):
    """Round, digest and contributions that counted of each that ended well."""
    found = []
    for process in processes:
        assert process.wait() == 0, process.err.read_text()
        lines = [line.split() for line in process.told if line.startswith("end")]
        found += [(int(number), digest, int(counted)) for _, number, digest, counted in lines]
    return found


def same_bits(found):
    """All that ended at a round hold the same."""
    digests = {}
    for number, digest, _ in found:
        assert digests.setdefault(number, digest) == digest
    return digests


def test_other_settings_of_jax_and_another_mesh_hold_the_same_bits(tmp_path, cache):
    store = (tmp_path / "store").as_uri()
    environments = [
        {"JAX_NUM_CPU_DEVICES": "1", "JAX_ENABLE_X64": "1", "JAX_THREEFRY_PARTITIONABLE": "0"},
        {"JAX_NUM_CPU_DEVICES": "8", "PJRT_NPROC": "32"},
        {"JAX_NUM_CPU_DEVICES": "2", "PJRT_NPROC": "3"},
    ]
    commands = [[PROGRAM, store, name, "4"] for name in ("a", "b", "c")]
    with running(tmp_path, commands, environments, cache=cache) as processes:
        found = ends(processes)
    assert len(same_bits(found)) == 1
    assert all(counted for _, _, counted in found)


def test_an_island_may_be_of_two_processes(tmp_path, cache):
    store, address = (tmp_path / "store").as_uri(), f"localhost:{free_port()}"
    commands = [
        [PROGRAM, store, "a", "4"],
        [PROGRAM, store, "b", "4"],
        *([PROGRAM, store, "c", "4", address, "2", str(number)] for number in range(2)),
    ]
    environments = [{"JAX_NUM_CPU_DEVICES": "2"}] * 4
    with running(tmp_path, commands, environments, cache=cache) as processes:
        found = ends(processes)
    assert len(found) == 3
    assert len(same_bits(found)) == 1


@pytest.mark.parametrize("kills", [3, pytest.param(25, marks=pytest.mark.slow)])
def test_islands_that_are_killed_at_any_instant_come_back(tmp_path, cache, kills):
    """One of three is killed and started again, so often; all hold the same bits at the end."""
    store, rng = (tmp_path / "store").as_uri(), random.Random(kills)
    rounds = 10 * kills
    command = [PROGRAM, store, "a", str(rounds)]
    others = [[PROGRAM, store, name, str(rounds)] for name in ("b", "c")]
    (tmp_path / "others").mkdir()
    with running(tmp_path / "others", others, cache=cache) as processes:
        for number in range(kills):
            folder = tmp_path / str(number)
            folder.mkdir()
            with running(folder, [command], cache=cache) as (mortal,):
                assert mortal.said("in"), mortal.err.read_text()
                time.sleep(rng.uniform(0, 1))
                mortal.popen.kill()
        (tmp_path / "last").mkdir()
        with running(tmp_path / "last", [command], cache=cache) as last:
            found = ends([*processes, *last])
    assert len(found) == 3
    same_bits(found)
