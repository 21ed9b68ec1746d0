"""Tutorials, executed anew."""

import os
import pathlib
import tempfile
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).parents[1]
SECONDS = 600
"""That a cell may take, and the start, on a machine that has other things to do."""


def executed(file: pathlib.Path) -> Any:
    """A notebook with the outputs of this machine, from top to bottom in an empty folder."""
    notebook = nbformat.read(file, as_version=4)
    own = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    own["TF_CPP_MIN_LOG_LEVEL"] = "3"  # XLA tells of a compilation of minutes, on a loaded machine
    env = {**os.environ, **own}
    env.pop("JAX_NUM_CPU_DEVICES", None)  # its first cell says how many
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=SECONDS,
            kernel_name="python3",
            startup_timeout=SECONDS,
            resources={"metadata": {"path": folder}},
            coalesce_streams=True,
            record_timing=False,
        )
        client.execute(env=env)
    return notebook
