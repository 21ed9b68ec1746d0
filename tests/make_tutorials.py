"""Executes the tutorials, or those of the names, and stores what they print and draw.

python tests/make_tutorials.py [NAME ...]
"""

import sys
import time

import nbformat
from tutorials import ROOT, executed

if __name__ == "__main__":
    for file in sorted((ROOT / "docs/tutorials").glob("*.ipynb")):
        if file.stem in sys.argv[1:] or not sys.argv[1:]:
            start = time.perf_counter()
            nbformat.write(executed(file), file)
            print(f"{file.stem}: {time.perf_counter() - start:.0f} s")
