"""Hook of mkdocs: a notebook is a page, with the outputs that are stored in it.

Nothing is executed here: `python tests/make_tutorials.py` does that. A page looks as all others do,
its links are checked as theirs are, and it asks no other site for anything.
"""

import html
import json
import pathlib
import shutil
from typing import Any

from mkdocs.structure.files import File, Files


class Notebook(File):
    """A notebook among the files of the docs, which mkdocs reads as Markdown."""

    def is_documentation_page(self) -> bool:
        """Whether it becomes a page, which its name does not say."""
        return True

    @property
    def content_string(self) -> str:
        """The Markdown."""
        return markdown(json.loads(self.content_bytes), pathlib.PurePath(self.src_uri).name)


def on_files(files: Files, **_: Any) -> Files:
    """Makes pages of the notebooks."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
        where = (file.src_uri, file.src_dir, file.dest_dir, file.use_directory_urls)
        files.append(Notebook(*where, inclusion=file.inclusion))
    return files


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Puts the notebook beside its page, where the link to it leads."""
    if isinstance(page.file, Notebook):
        folder = pathlib.Path(page.file.abs_dest_path).parent
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(page.file.abs_src_path, folder)
    return output


def markdown(notebook: dict[str, Any], name: str) -> str:
    """The cells of a notebook one after the other, and below the first where to get it."""
    first, *others = map(cell, notebook["cells"])
    link = f'<a href="{name}" download>Download this page as a notebook</a>'
    return "\n\n".join([first, link, *others]) + "\n"


def cell(cell: dict[str, Any]) -> str:
    """A cell: its text, or its code and below it what that has printed and drawn."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    shown = (output(one, cell["metadata"].get("alt", "")) for one in cell["outputs"])
    return "\n\n".join([fenced(source, "python"), *shown])


def output(output: dict[str, Any], alt: str) -> str:
    """What a cell has printed, or the picture that it has drawn."""
    if "text" in output:
        return fenced("".join(output["text"]), "{ .text .no-copy .output }")
    picture = "".join(output["data"]["image/png"]).strip()
    return f'<img class="drawn" alt="{html.escape(alt)}" src="data:image/png;base64,{picture}">'


def fenced(text: str, kind: str) -> str:
    """A block of code."""
    return f"```{kind}\n{text.rstrip()}\n```"
