"""Real servers for tests of stores, of `benchmarks/stores.py`."""

import contextlib
import importlib
from collections.abc import Generator
from typing import Any

import pytest
from processes import ROOT

REAL = ("seaweed", "ceph")


@contextlib.contextmanager
def serving(name: str, folder: Any) -> Generator[Any]:
    """A server of this kind, with the environment to use it; skips where it is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        stores: Any = importlib.import_module("stores")
        try:
            with getattr(stores, name)(folder) as server:
                for key, value in server.environment.items():
                    patch.setenv(key, value)
                yield server
        except stores.MissingError as missing:
            pytest.skip(f"{missing}; see CONTRIBUTING.md")
