"""What a release says of itself in several places is the same, and an index can show the README."""

import pathlib
import re
import runpy
import sys
import tomllib
import types

import pytest
import yaml

import fftgrad as fg

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HOME = "https://example.org/someone/fftgrad"


def read(path):
    """A YAML file of the repository."""
    return yaml.safe_load((ROOT / path).read_text())


@pytest.fixture
def build(monkeypatch):
    """The hook of the build, without what builds."""
    interface = types.SimpleNamespace(MetadataHookInterface=object)
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", interface)
    return runpy.run_path(str(ROOT / "hatch_build.py"))


def test_every_place_names_one_version():
    assert fg.__version__ == PROJECT["version"], "run `pip install -e .` again"
    headings = re.findall(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == PROJECT["version"]
    assert read("CITATION.cff")["version"] == PROJECT["version"]
    assert read("conda/recipe.yaml")["context"]["version"] == PROJECT["version"]


def test_the_recipe_installs_what_pip_installs():
    recipe = read("conda/recipe.yaml")
    run = {one.replace(" ", "") for one in recipe["requirements"]["run"] if "python" not in one}
    assert run == set(PROJECT["dependencies"])
    name, _, target = recipe["build"]["python"]["entry_points"][0].partition(" = ")
    assert PROJECT["scripts"] == {name: target}
    assert recipe["about"]["summary"] == PROJECT["description"]


def test_the_classifiers_name_the_pythons_that_are_tested():
    rows = read(".github/workflows/ci.yml")["jobs"]["run"]["strategy"]["matrix"]["include"]
    form = r"Programming Language :: Python :: (3\.\d+)"
    named = [found[1] for one in PROJECT["classifiers"] if (found := re.fullmatch(form, one))]
    assert named == [row["python"] for row in rows]
    assert PROJECT["requires-python"] == f">={named[0]}"


TEXT = """\
See [the plan](docs/plan.md#a) and [JAX](https://jax.dev), or [here](#links).
![Loss](docs/figures/a.png)
<picture><source srcset="docs/b.png"><img src="docs/c.png" alt="c"></picture>

```python
a = b[0](c)  # [not](a/link.md)
```
"""


def test_with_an_address_links_and_pictures_are_found(build, tmp_path):
    (tmp_path / "README.md").write_text(TEXT)
    (tmp_path / "pyproject.toml").write_text(f'[tool.fftgrad]\nrepository = "{HOME}/"\n')
    hook, metadata = build["Hook"](), {"version": "1.2"}
    hook.root = str(tmp_path)
    hook.update(metadata)
    assert metadata["readme"]["content-type"] == "text/markdown"
    for target in (
        f"({HOME}/blob/v1.2/docs/plan.md#a)",
        "(https://jax.dev)",
        "(#links)",
        f"![Loss]({HOME}/raw/v1.2/docs/figures/a.png)",
        f'srcset="{HOME}/raw/v1.2/docs/b.png"',
        f'src="{HOME}/raw/v1.2/docs/c.png"',
        "a = b[0](c)  # [not](a/link.md)",
    ):
        assert target in metadata["readme"]["text"]
    assert metadata["urls"]["Repository"] == HOME
    assert metadata["urls"]["Changelog"] == f"{HOME}/blob/main/CHANGELOG.md"


def test_without_an_address_there_are_no_dead_links(build):
    text = build["readme"](TEXT, "", "v1")
    assert text.startswith("See the plan and [JAX](https://jax.dev), or [here](#links).\n")
    assert "docs/" not in text
    assert "Loss" not in text
    assert "<" not in text
    assert "a = b[0](c)  # [not](a/link.md)" in text
    assert build["urls"]("") == {}


@pytest.mark.parametrize("repository", ["", HOME])
def test_no_link_of_the_readme_is_relative(build, repository):
    text = build["readme"]((ROOT / "README.md").read_text(), repository, "v1")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\(([^)\s]+)\)|src(?:set)?=\"([^\"]+)\"", prose)
    assert all(re.match(r"https?:|#", one or other) for one, other in targets)
    assert bool(targets) == bool(repository)
