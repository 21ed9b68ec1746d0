"""The rows of one number of workers as the rows of another, on the host."""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]


def spread(rows: Array, workers: int) -> Array:
    """`rows` [N, ...] as [M, ...], with the same mean.

    N and M equal intervals lie on [0, 1], and r'_j = Σ_i M |I_j ∩ I_i| r_i. The weights of a new
    row sum to one, so it is a mean of old ones, and where M divides into N or N into M a plain mean
    or a copy. What is no number has no mean: there the row is that of the first old interval in it.
    """
    if not jnp.issubdtype(rows.dtype, jnp.inexact):
        return rows[[j * len(rows) // workers for j in range(workers)]]
    out = np.empty((workers, *rows.shape[1:]), rows.dtype)
    for j in range(workers):
        shares = list(_shares(j, workers, len(rows)))
        if len(shares) == 1:
            out[j] = rows[shares[0][0]]
            continue
        total = sum(share * rows[i].astype(_wide(rows.dtype)) for i, share in shares)
        out[j] = np.asarray(total).astype(rows.dtype)
    return out


def _shares(j: int, workers: int, before: int) -> Iterator[tuple[int, float]]:
    """The old rows of which a new one consists, and how much of it each is."""
    start, stop = j * before, (j + 1) * before  # in units of 1 / (before · workers)
    for i in range(start // workers, -(-stop // workers)):
        overlap = min(stop, (i + 1) * workers) - max(start, i * workers)
        yield i, overlap / before


def _wide(dtype: np.dtype[np.generic]) -> type[np.inexact]:
    return np.complex128 if np.issubdtype(dtype, np.complexfloating) else np.float64


def join(rows: Array, size: int) -> Array:
    """What `shards` cut, for shards [w, s, ...] along the first two axes."""
    least, longer = divmod(size, len(rows))
    return np.concatenate([row[: least + (i < longer)] for i, row in enumerate(rows)])


def cut(joined: Array, shards: int) -> Array:
    """A vector [n, ...] in shards [w, ceil(n / w), ...], as the exchanges cut theirs."""
    size = -(-len(joined) // shards)
    return np.stack([_filled(part, size) for part in np.array_split(joined, shards)])


def _filled(part: Array, size: int) -> Array:
    """As the exchanges fill: with the last value, or zero where there is none."""
    rest = [(0, size - len(part)), *((0, 0) for _ in part.shape[1:])]
    return np.pad(part, rest, mode="edge" if len(part) else "constant")
