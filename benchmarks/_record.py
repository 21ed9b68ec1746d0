"""What every result file says of its own making."""

import os
import pathlib
import platform
import subprocess
import sys
from typing import Any

import jax
import numpy as np


def head() -> dict[str, Any]:
    """The command, the commit, the machine and the versions."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=pathlib.Path(__file__).parent,
    )
    kind = jax.devices()[0].device_kind
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit.stdout.strip(),
        "device": f"{kind} ({platform.machine()}, {os.cpu_count()} cores)",
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "numpy": np.__version__,
        },
    }
