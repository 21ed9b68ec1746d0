"""`python -m fftgrad`, which is also the console script `fftgrad`."""

import sys
from collections.abc import Sequence

EXTRA = ("matplotlib",)
"""Packages of the extra `cli`, which `fftgrad analyze --png` needs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        from fftgrad.planning._commands import run

        return run(argv)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRA:
            raise
        print(
            f'fftgrad: {missing} is not installed; run pip install -e ".[cli]" in the folder of '
            "the repository",
            file=sys.stderr,
        )
        return 2


if __name__ == "__main__":
    sys.exit(main())
