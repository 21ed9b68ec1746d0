"""What the authors of the methods published as code, beside fftgrad on the same inputs.

`python benchmarks/authors.py NAME --checkout PATH` imports the code of a checkout, which is theirs
and not part of this repository, and runs it and fftgrad on the same gradients, with the states
carried from step to step. It prints the largest differences and writes them to a file. The modules
of `benchmarks/others` say which repository it is; torch's own hook needs no checkout. Some need
`einops` or `networkx`.
"""

import argparse
import importlib
import json
import pathlib
import re
import subprocess
from collections.abc import Iterator
from typing import Any

from _record import RESULTS, folder_at, head, markdown, write

FOLDER = RESULTS / "others"
NAMES = (
    "torch_hook",
    "powersgd",
    "powersgd_paper",
    "acpsgd",
    "dion",
    "demo",
    "eden",
    "grace",
    "asyncdiloco",
    "templar",
    "beer",
    "choco",
    "datalens",
    "deepspeed",
    "terngrad",
)
COLUMNS = (
    "theirs",
    "ours",
    "inputs",
    "largest difference",
    "verdict",
    "differs by choice, or so made equal",
)


def source(name: str) -> Any:
    """The module of a source."""
    return importlib.import_module(f"others.{name}")


def version(module: Any, checkout: pathlib.Path | None) -> str:
    """The commit of the checkout, or the version of a package."""
    if checkout is None:
        return module.VERSION
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def cells(rows: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """The rows of a table."""
    for row in rows:
        unit, found = row["unit"], row["difference"]
        number = f"{found:.2g}" if found >= 0.01 or not found else f"{found:.0e}"
        told = number if unit == "relative" else f"{number} {unit}"
        yield row["theirs"], row["ours"], row["inputs"], told, row["verdict"], row["differs"]


def shown(record: dict[str, Any]) -> str:
    """All rows of a source, with its commit and license."""
    repository = record["repository"]
    address = f"[{repository}](https://github.com/{repository})"
    return f"{address}, {record['version']}; license: {record['license']}.\n\n" + markdown(
        COLUMNS, cells(record["rows"])
    )


def summary() -> str:
    """What the page has: a row for each source, with the worst of all that agrees."""
    rows: list[list[str]] = []
    for name in NAMES:
        record = json.loads((FOLDER / f"{name}.json").read_text())
        found, repository = record["rows"], record["repository"]
        ours = dict.fromkeys(re.findall(r"`(\w+)", " ".join(row["ours"] for row in found)))
        chosen = [row for row in found if row["verdict"] == "by choice"]
        worst = max(
            row["difference"] for row in found if row["unit"] == "relative" and row not in chosen
        )
        rows.append(
            [
                f"[{repository}](https://github.com/{repository}), {record['version']}",
                record["license"],
                ", ".join(f"`{name}`" for name in ours),
                f"{len(found)}",
                f"{worst:.0e}" if worst else "0",
                f"{len(chosen)}",
            ]
        )
    columns = ["their code", "license", "ours", "rows", "largest difference", "by choice"]
    return markdown(columns, rows)


def compared(name: str, checkout: pathlib.Path | None, smoke: bool) -> dict[str, Any]:
    """Runs one source."""
    module = source(name)
    found = list(module.compare(checkout, smoke))
    where = " --checkout CHECKOUT" * bool(checkout) + " --smoke" * smoke
    return head() | {
        "command": f"python benchmarks/authors.py {name}{where}",
        "repository": module.REPOSITORY,
        "version": version(module, checkout),
        "license": module.LICENSE,
        "rows": [row._asdict() | {"verdict": row.verdict} for row in found],
    }


def main() -> None:
    """Runs one source, or shows the tables of all committed results."""
    out = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    out.add_argument("name", nargs="?", choices=NAMES, help="whose code")
    out.add_argument("--checkout", type=folder_at, help="the folder of it")
    out.add_argument("--out", type=folder_at, default=FOLDER, help="folder for the results")
    out.add_argument("--smoke", action="store_true", help="a few rows only")
    args = out.parse_args()
    if args.name is None:
        records = [FOLDER / f"{name}.json" for name in NAMES]
        print("\n\n".join(shown(json.loads(p.read_text())) for p in records if p.exists()))
        return
    checkout = args.checkout and args.checkout.resolve()
    module = source(args.name)
    needed = f"--checkout: must be a clone of https://github.com/{module.REPOSITORY}"
    if checkout is None and not hasattr(module, "VERSION"):
        out.error(f"{needed}, got none; clone it and pass its folder.")
    try:
        record = compared(args.name, checkout, args.smoke)
    except (FileNotFoundError, ModuleNotFoundError, subprocess.CalledProcessError) as problem:
        out.error(f"{needed}, with what it imports, got {checkout}: {problem}")
    print(shown(record))
    write(args.out / f"{args.name}.json", record, rows="rows")


if __name__ == "__main__":
    main()
