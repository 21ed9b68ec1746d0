"""The codec that loses least of a sample of gradients, found by measuring."""

import bisect
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fftgrad as fg
from fftgrad._contracts import PyTree
from fftgrad._values import check_within
from fftgrad.advise import _inputs
from fftgrad.codecs import _chain

Family = Callable[[int], fg.Codec | None]
"""What a family of codecs makes of so many bytes; None if nothing of it is so small."""

Measure = Callable[[fg.Codec], "CodecSearchRow"]

TRANSFORMS = (fg.Identity(), fg.Dct(block=16), fg.Dct(block=64), fg.Fft(block=64))
LEVEL_BITS = (3, 4, 6)
DENSE = (
    fg.Sign(),
    *(fg.chain(fg.Hadamard(), fg.codecs.LloydMax(bits=bits)) for bits in (1, 2, 3, 4)),
    fg.Cast("bfloat16"),
    fg.Identity(),
)
SIZES_PER_OCTAVE, OCTAVES = 4, 14
"""Of the sizes that are tried to reach an error, down from that of float32."""


class CodecSearchRow(NamedTuple):
    """One codec that was tried.

    Attributes:
      codec: what it is.
      bytes: `fg.wire_bytes` of it.
      error: √(Σ ||g - ĝ||² / Σ ||g||²) over the sample.
    """

    codec: fg.Codec
    bytes: int
    error: float


class CodecSearch(NamedTuple):
    """What `fg.advise.search_codec` found.

    Attributes:
      codec: the best one.
      bytes: `fg.wire_bytes` of it.
      error: its relative error on the sample.
      rows: all that were tried, the best first. The basis of the first rows is the one that
        compacts these gradients.
    """

    codec: fg.Codec
    bytes: int
    error: float
    rows: tuple[CodecSearchRow, ...]

    def __str__(self) -> str:
        lines = [
            f"{row.bytes:>12,} bytes, error {row.error:.4f}  {row.codec!r}" for row in self.rows
        ]
        return "\n".join(lines)


def search_codec(
    *gradients: PyTree,
    bytes: int | None = None,  # noqa: A002 (what fg.Budget and fg.wire_bytes call it)
    error: float | None = None,
) -> CodecSearch:
    """Function: the codec of least error in so many bytes, or of least bytes for such an error.

    By measuring, on the gradients that it is given, before training: each basis (none, `Dct` of 16
    and 64, `Fft` of 64) with a filled message (`Budget`), the best of them with `TopK` and
    `LogLevels` of 3, 4 and 6 bits, and dense codecs: `Sign`, `Hadamard` with `LloydMax` of 1 to 4
    bits, bfloat16 and float32. All leaves make one vector. What training makes of an error is
    another matter, and with error feedback it is less than it looks.

    Nothing is drawn but by one fixed key, so all workers find the same for the same gradients. Give
    all of them the same, such as those of the first batch, or send the `repr` of what one finds.

    It compiles a dozen programs: 20 to 60 seconds on a CPU.

    Args:
      *gradients: trees of one structure, of floating-point numbers; a few of different steps.
      bytes: what a worker may send, as `fg.wire_bytes` counts: with the header of 8 bytes, which
        the bytes of `Budget` do not have in them.
      error: the relative error that may be.

    Returns:
      A `CodecSearch`; `print` shows all that met the condition.

    Raises:
      ValueError: unless one of `bytes` and `error` is given; if `bytes` are too few for any.

    Example:
      >>> wave = jnp.sin(jnp.arange(512.0) / 9)
      >>> fg.advise.search_codec(wave, bytes=100).codec
      chain(Dct(), Budget(bytes=92))
    """
    sample = _rows(gradients)
    if (bytes is None) == (error is None):
        raise ValueError(
            f"search_codec(bytes, error): exactly one must be given, got bytes={bytes}, "
            f"error={error}; use bytes=100_000."
        )
    if error is not None:
        check_within("search_codec(error)", error, "(0, 1)", "use error=0.3.")
    like = jax.ShapeDtypeStruct(sample.shape[1:], jnp.float32)
    measure = functools.cache(functools.partial(tried, sample))
    rows = _within(error, like, measure) if error else _in_bytes(bytes or 0, like, measure)
    if not rows:
        raise ValueError(
            f"search_codec(bytes): must hold a coefficient and what goes with it, got {bytes}; use "
            "bytes=28 or more."
        )
    return CodecSearch(*rows[0], rows=tuple(rows))


def _rows(gradients: tuple[PyTree, ...]) -> jax.Array:
    """The gradients as rows."""
    named = {f"gradients[{number}]": tree for number, tree in enumerate(gradients)}
    trees = _inputs.alike("search_codec", named)
    rows = np.stack([np.concatenate([leaf.ravel() for leaf in own.values()]) for own in trees])
    rows = rows.astype(np.float32)
    _inputs.check_values("search_codec", rows)
    return jnp.asarray(rows)


def tried(sample: jax.Array, codec: fg.Codec) -> CodecSearchRow:
    """What a codec sends and loses of the rows of a sample."""
    step, like = fg.Step.of(0), jax.ShapeDtypeStruct(sample.shape[1:], jnp.float32)

    @jax.jit
    def lost(row: jax.Array) -> jax.Array:
        return row - fg.decompress(codec, fg.compress(codec, row, step=step), like, step=step)

    rows = [np.asarray(lost(row), np.float64) for row in sample]
    whole = np.linalg.norm(np.asarray(sample, np.float64))
    return CodecSearchRow(codec, fg.wire_bytes(codec, like), float(np.linalg.norm(rows) / whole))


def filled(basis: fg.Codec, size: int) -> fg.Codec | None:
    """The family of filled messages."""
    return fg.chain(basis, fg.Budget(bytes=(size - 8) // 4 * 4)) if size >= 28 else None


def counted(basis: fg.Codec, bits: int, like: jax.ShapeDtypeStruct, size: int) -> fg.Codec | None:
    """The family of the largest coefficients, as many as fit."""

    def of(k: int) -> fg.Codec:
        return fg.chain(basis, fg.TopK(k=k), fg.LogLevels(bits=bits))

    counts = range(1, min(like.size, 8 * size // bits) + 1)
    most = bisect.bisect_right(counts, size, key=lambda k: fg.wire_bytes(of(k), like))
    return of(most) if most else None


def dense(codec: fg.Codec, like: jax.ShapeDtypeStruct, size: int) -> fg.Codec | None:
    """The family of one codec."""
    return codec if fg.wire_bytes(codec, like) <= size else None


FILLED = [functools.partial(filled, basis) for basis in TRANSFORMS]


def others(basis: fg.Codec, bits: Sequence[int], like: jax.ShapeDtypeStruct) -> list[Family]:
    """What is tried beside the filled messages: the largest in a basis, and dense codecs."""
    return [
        *(functools.partial(counted, basis, width, like) for width in bits),
        *(functools.partial(dense, codec, like) for codec in DENSE),
    ]


def _others(like: jax.ShapeDtypeStruct, rows: list[CodecSearchRow]) -> list[Family]:
    """The same in the best basis among the rows of the filled messages."""
    best = _chain.stages(rows[0].codec)[0] if rows else fg.Identity()
    return others(best if best in TRANSFORMS else fg.Identity(), LEVEL_BITS, like)


def _in_bytes(size: int, like: jax.ShapeDtypeStruct, measure: Measure) -> list[CodecSearchRow]:
    """What every family makes of so many bytes, the least error first."""

    def measured(families: Sequence[Family]) -> list[CodecSearchRow]:
        codecs = [codec for family in families if (codec := family(size)) is not None]
        return sorted(map(measure, codecs), key=lambda row: (row.error, row.bytes))

    rows = measured(FILLED)
    return sorted([*rows, *measured(_others(like, rows))], key=lambda row: (row.error, row.bytes))


def _within(error: float, like: jax.ShapeDtypeStruct, measure: Measure) -> list[CodecSearchRow]:
    """Of each family the smallest within the error, if smaller than those before; the best first.

    The sizes are in steps of a quarter of an octave.
    """
    whole = fg.wire_bytes(fg.Identity(), like)
    steps = range(SIZES_PER_OCTAVE * OCTAVES)
    sizes = [math.ceil(whole * 2 ** (-step / SIZES_PER_OCTAVE)) for step in steps]
    rows, best = [measure(fg.Identity())], 0

    def row_of(family: Family, step: int) -> CodecSearchRow | None:
        codec = family(sizes[step])
        row = None if codec is None else measure(codec)
        return row if row is not None and row.error <= error else None

    for families in (lambda: FILLED, lambda: _others(like, rows)):
        for family in families():
            if best + 1 < len(sizes) and row_of(family, best + 1):
                fails = functools.partial(lambda family, step: not row_of(family, step), family)
                best += bisect.bisect_left(steps[best + 1 :], True, key=fails)
                rows[:0] = filter(None, [row_of(family, best)])
    return rows
