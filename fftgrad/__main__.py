"""`python -m fftgrad`, which is also the console script `fftgrad`."""

import sys
from collections.abc import Sequence

EXTRA = ("matplotlib", "rich")
"""What the command line needs beyond the library: the extra `cli`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    try:
        from fftgrad.planning.commands._frame import run

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
