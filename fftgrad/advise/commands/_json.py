"""What a command found, for programs."""

import json
import math
import pathlib
from typing import Any

from rich.console import Console


def write(record: Any, path: pathlib.Path | None, console: Console) -> None:
    """Writes a record to a file; to the console for "-", and nowhere for None."""
    if path is None:
        return
    text = json.dumps(plain(record), indent=1, allow_nan=False, ensure_ascii=False, default=repr)
    if str(path) == "-":
        console.out(text, highlight=False)
    else:
        path.write_text(text + "\n", encoding="utf-8")


def plain(value: Any) -> Any:
    """The same in dicts and lists; None for a number that is not finite, which JSON has not."""
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
