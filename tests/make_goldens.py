"""Adds what tests/goldens.npz and tests/golden_bytes lack, and drops what is no row any more.

Rows that are named are made anew, and all of them with `--all`: after a change of the wire, whose
version must go up with it.
"""

import argparse

import jax
import numpy as np

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_disable_most_optimizations", True)  # as in the tests

import goldens  # noqa: E402  (it makes arrays)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="make all of them anew")
    parser.add_argument("rows", nargs="*", help="rows of tests/cases.py to make anew")
    args = parser.parse_args()
    old = dict(np.load(goldens.FILE))
    made = {}
    for key, make in goldens.makers().items():
        again = args.all or key not in old or key.partition(" ")[2] in args.rows
        made[key] = make() if again else old[key]
    np.savez_compressed(goldens.FILE, **made)
    for file, name in goldens.STORED.items():
        if args.all or name in args.rows or not (goldens.BYTES / file).exists():
            (goldens.BYTES / file).write_bytes(goldens.stored(file))
