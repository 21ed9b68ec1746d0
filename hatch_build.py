"""A hook of the build: the README as a package index shows it, and the links of the project.

An index shows no files beside the README, so links to files, and pictures, get the address of the
repository, which pyproject.toml has in [tool.fftgrad], at the tag of this version. As long as there
is none, such links become their text, and pictures are left out.
"""

import pathlib
import re
import tomllib
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

CODE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
MARKDOWN = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")
HTML = re.compile(r"\b(src|srcset)=\"(?![a-z]+:)([^\"]+)\"")
PICTURE = re.compile(r"<picture>.*?</picture>|<img [^>]*>", re.DOTALL)


def readme(text: str, repository: str, tag: str) -> str:
    """The text with addresses in place of paths; code stays as it is."""

    def link(found: re.Match[str]) -> str:
        picture, name, path = found.groups()
        if not repository:
            return "" if picture else name
        kind = "raw" if picture else "blob"
        return f"{picture}[{name}]({repository}/{kind}/{tag}/{path})"

    def prose(part: str) -> str:
        if not repository:
            part = PICTURE.sub("", part)
        part = HTML.sub(rf'\1="{repository}/raw/{tag}/\2"', part)
        return MARKDOWN.sub(link, part)

    parts = CODE.split(text)
    return "".join(part if part.startswith("```") else prose(part) for part in parts)


def urls(repository: str) -> dict[str, str]:
    """What an index lists beside the README."""
    pages = {"Repository": "", "Issues": "/issues", "Changelog": "/blob/main/CHANGELOG.md"}
    return {name: repository + path for name, path in pages.items()} if repository else {}


class Hook(MetadataHookInterface):
    """Fills in what pyproject.toml leaves dynamic."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Sets the README and the addresses."""
        root = pathlib.Path(self.root)
        tool = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
        repository = tool["fftgrad"]["repository"].rstrip("/")
        text = (root / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": readme(text, repository, f"v{metadata['version']}"),
        }
        metadata["urls"] = urls(repository)
