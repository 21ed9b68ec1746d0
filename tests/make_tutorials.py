"""Executes the tutorials, or those of the names, and stores what they print and draw.

python tests/make_tutorials.py [NAME ...]
"""

import os
import pathlib
import sys
import tempfile
import time
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


if __name__ == "__main__":
    for file in sorted((ROOT / "docs/tutorials").glob("*.ipynb")):
        if file.stem in sys.argv[1:] or not sys.argv[1:]:
            start = time.perf_counter()
            nbformat.write(executed(file), file)
            print(f"{file.stem}: {time.perf_counter() - start:.0f} s")
