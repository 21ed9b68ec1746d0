"""How far a long run is, on standard error, if a person looks at it.

No thread draws beside what is being timed.
"""

import contextlib
import time
from collections.abc import Callable, Generator

from rich.console import Console
from rich.live import Live
from rich.progress import Progress

EVERY = 0.1
"""Seconds between two drawings."""


@contextlib.contextmanager
def progress(what: str, total: float) -> Generator[Callable[[float], None]]:
    """A bar that is gone at the end; what it gives is told how much more is done."""
    console = Console(stderr=True, highlight=False)
    drawn = time.monotonic()
    with Progress(
        console=console, transient=True, auto_refresh=False, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=total)
        bar.refresh()

        def tell(more: float) -> None:
            nonlocal drawn
            bar.advance(task, more)
            if time.monotonic() - drawn > EVERY:
                bar.refresh()
                drawn = time.monotonic()

        yield tell


@contextlib.contextmanager
def waiting(what: str) -> Generator[Callable[[str], None]]:
    """A line that says what is going on, where nobody knows how long it takes."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda _: None
        return
    with Live(what, console=console, transient=True, auto_refresh=False) as shown:
        yield lambda name: shown.update(f"{what}: {name}", refresh=True)
