"""`python -m fftgrad`, which is also the console script `fftgrad`."""

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    from fftgrad.planning._commands import run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
