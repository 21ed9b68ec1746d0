"""`python -m fftgrad`, which is also the console script `fftgrad`."""

import sys
from collections.abc import Sequence

EXTRA = ("matplotlib",)
"""What the figure of `fftgrad analyze --png` needs: the extra `cli`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
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
