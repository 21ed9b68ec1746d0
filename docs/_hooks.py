"""Hooks of mkdocs: a table at the top of each page of the reference, and links to the source."""

import functools
import re
from typing import Any

import griffe
from _sections import REPOSITORY

BLOCK = re.compile(r"^::: (\S+)$", re.MULTILINE)
HEAD = ["| name | kind | what it does |", "|---|---|---|"]


def on_config(config: Any) -> Any:
    """Pages have links to edit and to view them, once the repository has an address."""
    if REPOSITORY:
        config.repo_url, config.repo_name = REPOSITORY, config.site_name
        config.edit_uri = "edit/main/docs/"
        config.theme["features"] += ["content.action.edit", "content.action.view"]
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with a table of what it describes, before the first of them."""
    first = BLOCK.search(markdown)
    if not first:
        return markdown
    table = "\n".join(HEAD + [row(path) for path in BLOCK.findall(markdown)])
    return f"{markdown[: first.start()]}{table}\n\n{markdown[first.start() :]}"


def row(path: str) -> str:
    """A name, its kind and the first sentence of its docstring."""
    kind, what = described(path)
    name = path.removeprefix("fftgrad.")
    return f"| [`{name}`][{path}] | {kind} | {what.replace('|', chr(92) + '|')} |"


def described(path: str) -> tuple[str, str]:
    """Its kind, such as Codec, and what it does: the two parts of a docstring's first line."""
    found = package()[path.removeprefix("fftgrad.")]
    docstring = (found.final_target if found.is_alias else found).docstring
    first, _, _ = docstring.value.partition("\n\n")
    kind, colon, what = " ".join(first.split()).partition(": ")
    return (kind, what) if colon and " " not in kind else ("", " ".join(first.split()))


@functools.cache
def package() -> Any:
    """The package as it is in the source, without importing it."""
    return griffe.load("fftgrad", search_paths=["."])
