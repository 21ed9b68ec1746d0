"""`fg.__version__`, pyproject.toml and CHANGELOG.md name the same version."""

import importlib.metadata
import pathlib
import re
import runpy
import tomllib

import fftgrad as fg

ROOT = pathlib.Path(__file__).parents[1]


def test_the_version_is_the_one_in_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert fg.__version__ == project["version"], "run `pip install -e .` again"


def test_the_newest_release_in_the_changelog_is_this_version():
    headings = re.findall(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == fg.__version__


def test_without_an_installation_the_version_says_so(monkeypatch):
    def not_found(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_found)
    assert runpy.run_path(fg.__file__)["__version__"] == "0+not.installed"
