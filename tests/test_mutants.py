"""Faults put into the package on purpose: the tests must notice each one.

To add one, give a file of the package, a text that is in it exactly once, what to put in its place,
and the tests that should fail. They are run without the fault first, and must pass.
"""

import functools
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent


class Mutant(NamedTuple):
    file: str
    old: str
    new: str
    tests: str


MUTANTS = {
    "the memory moves on a bad step": Mutant(
        "_pmean.py",
        "remembered = _parts.where(finite, add_worker_axis(remembered), state.memory)",
        "remembered = add_worker_axis(remembered)",
        "tests/test_nonfinite.py -k 'any_memory and 5000 and Nesterov'",
    ),
    "the server memory of two stages moves on a bad step": Mutant(
        "exchanges/_two_stage.py",
        "_parts.where(finite, add_worker_axis(remembered), state.server)",
        "add_worker_axis(remembered)",
        "tests/test_bad_steps.py -k 'keeps_survives and server'",
    ),
    "the state of a codec moves on a bad step": Mutant(
        "exchanges/_all_gather.py",
        "adapted = _parts.where(_axes.everywhere(jnp.all(headers.finite)), adapted, own)",
        "",
        "tests/test_bad_steps.py -k 'keeps_survives and codec'",
    ),
    "the factors of a low rank move on a bad step": Mutant(
        "exchanges/_power_sgd.py",
        "PowerSgdState(_parts.where(finite, rights, state.factors))",
        "PowerSgdState(rights)",
        "tests/test_bad_steps.py -k 'keeps_survives and factors'",
    ),
    "the drift moves on a bad step": Mutant(
        "exchanges/_shared_support.py",
        "_parts.where(finite, _drifted(drift, selector, side, mean), drift)",
        "_drifted(drift, selector, side, mean)",
        "tests/test_bad_steps.py -k 'keeps_survives and drift'",
    ),
    "a bad worker is not seen by the others": Mutant(
        "exchanges/_all_gather.py",
        "start = jnp.where(jnp.all(headers.finite), 0.0, jnp.nan)",
        "start = jnp.zeros(())",
        "tests/test_exchanges.py -k fixed_range",
    ),
    "a chain forgets the overflow of its first stages": Mutant(
        "_chain.py",
        "overflow = overflow + payload.overflow",
        "overflow = payload.overflow",
        "tests/test_extremes.py -k 'counts_what_overflows and second'",
    ),
    "a chain forgets the overflow of its last stage": Mutant(
        "_chain.py",
        "overflow = overflow + payload.overflow",
        "overflow = overflow if sides[1:] else payload.overflow",
        "tests/test_extremes.py -k 'counts_what_overflows and last'",
    ),
    "the shards of two stages share a dither": Mutant(
        "exchanges/_two_stage.py",
        "return _compress(codecs, rows, _draw(rngs, number))",
        "return _compress(codecs, rows, _draw(rngs, 0))",
        "tests/test_bytes.py -k no_two_shards",
    ),
    "recovery compares with the error unsquared": Mutant(
        "exchanges/_recover.py",
        "self.max_error**2 * sums[1]",
        "self.max_error * sums[1]",
        "tests/test_bad_steps.py -k compares_the_error",
    ),
    "recovery judges by the error of one worker": Mutant(
        "exchanges/_recover.py",
        "sums = lax.psum(jnp.stack([_square(lost), _square(x)]), axis_name)",
        "sums = jnp.stack([_square(lost), _square(x)])",
        "tests/test_bad_steps.py -k errors_of_all_workers",
    ),
    "recovery forgets how low the loss was": Mutant(
        "exchanges/_recover.py",
        "best=jnp.fmin(state.best, smoothed)",
        "best=smoothed",
        "tests/test_bad_steps.py::test_the_loss_reaches_what_recovers_by_it[recover]",
    ),
    "codes beyond the largest number are not clamped": Mutant(
        "quantizers/_window.py",
        "number = jnp.minimum(index - 1 + self.base, _last(self.m))",
        "number = index - 1 + self.base",
        "tests/test_extremes.py -k any_codes",
    ),
    "feedback_adam ignores its bits": Mutant(
        "methods/_feedback_adam.py",
        "        bits,\n",
        "        None,\n",
        "tests/test_bytes.py -k 'bits and feedback_adam'",
    ),
    "the header has another version": Mutant(
        "_wire.py",
        "VERSION = 1\n",
        "VERSION = 2\n",
        "tests/test_bytes.py -k version_finite",
    ),
}


def copied(folder):
    """The package, its tests and its settings."""
    for name in ("fftgrad", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run(folder, tests):
    """The exit code of pytest, 0 for passed and 1 for failed, and what it printed."""
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-x", "-p", "no:cacheprovider"]
    out = subprocess.run(
        [*command, *shlex.split(tests)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return out.returncode, out.stdout + out.stderr


@functools.cache
def passes_without_a_fault(tests):
    return run(ROOT, tests)


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_the_place_of_a_fault_is_there_once(mutant):
    """Quick: the list must follow the package when that is rewritten."""
    text = (ROOT / "fftgrad" / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    assert mutant.new != mutant.old
    assert (ROOT / shlex.split(mutant.tests)[0].partition("::")[0]).exists()


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_fault_is_noticed(mutant, tmp_path):
    code, output = passes_without_a_fault(mutant.tests)
    assert code == 0, output
    folder = copied(tmp_path)
    path = folder / "fftgrad" / mutant.file
    path.write_text(path.read_text().replace(mutant.old, mutant.new))
    code, output = run(folder, mutant.tests)
    assert code == 1, f"not noticed by {mutant.tests}\n{output}"
