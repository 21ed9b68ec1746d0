"""`fg.__version__` and pyproject.toml name the same version."""

import importlib.metadata
import pathlib
import runpy
import tomllib

import fftgrad as fg

ROOT = pathlib.Path(__file__).parents[1]


def test_the_version_is_the_one_in_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert fg.__version__ == project["version"], "run `pip install -e .` again"


def test_without_an_installation_the_version_says_so(monkeypatch):
    def not_found(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_found)
    assert runpy.run_path(fg.__file__)["__version__"] == "0+not.installed"
