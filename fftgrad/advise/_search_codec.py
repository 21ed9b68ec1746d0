"""The codec that loses least of a sample of gradients, found by measuring."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from fftgrad._contracts import Codec, PyTree, Step
from fftgrad.codecs import _chain
from fftgrad.codecs._chain import chain
from fftgrad.codecs.quantizers import Cast, LloydMax, LogLevels, Sign
from fftgrad.codecs.selectors import Budget, TopK
from fftgrad.codecs.transforms import Dct, Fft, Hadamard, Identity
from fftgrad.exchanges import _layout
from fftgrad.tools._compress import compress, decompress
from fftgrad.tools._wire_bytes import wire_bytes

Family = Callable[[int], Codec | None]
"""What a family of codecs makes of so many bytes; None if nothing of it is so small."""

TRANSFORMS = (Identity(), Dct(block=16), Dct(block=64), Fft(block=64))
LEVEL_BITS = (3, 4, 6)
DENSE = (
    Sign(),
    *(chain(Hadamard(), LloydMax(bits=bits)) for bits in (1, 2, 3, 4)),
    Cast("bfloat16"),
    Identity(),
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

    codec: Codec
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

    codec: Codec
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
      *gradients: trees of one structure, float32, bfloat16 or float16; a few of different steps.
      bytes: what a worker may send, as `fg.wire_bytes` counts: with the header of 8 bytes, which
        the bytes of `Budget` do not have in them.
      error: the relative error that may be.

    Returns:
      A `CodecSearch`; `print` shows all that met the condition.

    Wire: nothing is sent.

    Raises:
      ValueError: if there is no gradient, they differ in shape, or hold only zeros or what is not
        finite; unless exactly one of `bytes` and `error` is given; if `bytes` are too few for any.
      TypeError: if a leaf is no floating-point array of at most 32 bits, or is traced.

    Example:
      >>> import fftgrad as fg
      >>> import jax.numpy as jnp
      >>> wave = jnp.sin(jnp.arange(512.0) / 9)
      >>> fg.advise.search_codec(wave, bytes=100).codec
      chain(Dct(), Budget(bytes=92))
    """
    sample = _sample(gradients)
    if (bytes is None) == (error is None):
        raise ValueError(
            f"search_codec(bytes, error): exactly one must be given, got bytes={bytes}, "
            f"error={error}; use "
            "bytes=100_000."
        )
    if error is not None and not 0 < error < 1:
        raise ValueError(f"search_codec(error): must be in (0, 1), got {error}; use error=0.3.")
    like = jax.ShapeDtypeStruct(sample.shape[1:], jnp.float32)
    measure = functools.partial(_measure, sample, like)
    if bytes is not None:
        rows = _in_bytes(bytes, like, measure)
    else:
        rows = _within(error or 0.0, like, measure)
    if not rows:
        raise ValueError(
            f"search_codec(bytes): must hold a coefficient and what goes with it, got {bytes}; use "
            "bytes=28 or more."
        )
    return CodecSearch(*rows[0], rows=tuple(rows))


def _sample(gradients: tuple[PyTree, ...]) -> jax.Array:
    """The gradients as rows."""
    rows: list[np.ndarray] = []
    for number, tree in enumerate(gradients):
        for path, leaf in jax.tree.leaves_with_path(tree):
            name = f"gradients[{number}]{jax.tree_util.keystr(path)}"
            _layout.check_leaf("search_codec", name, leaf)
            if isinstance(leaf, Tracer):
                raise TypeError(
                    f"search_codec({name}): must be a concrete array, because the size of a "
                    "payload is "
                    "static, got a traced one; call it before training, outside of jax.jit."
                )
        leaves = [np.asarray(leaf, np.float32).ravel() for leaf in jax.tree.leaves(tree)]
        rows.append(np.concatenate([*leaves, np.zeros(0, np.float32)]))
    sizes = {row.size for row in rows}
    if len(sizes) != 1 or not all(sizes):
        raise ValueError(
            f"search_codec(gradients): must be trees of one structure, with a value at least, got "
            f"{len(rows)} of {sorted(sizes)} values; pass the gradients of a few steps."
        )
    whole = np.stack(rows)
    if not whole.any():
        raise ValueError(
            "search_codec(gradients): must not be all zero, got only zeros; pass those of other "
            "steps."
        )
    if not np.isfinite(whole).all():
        raise ValueError(
            f"search_codec(gradients): must be finite, got {int((~np.isfinite(whole)).sum())} "
            "values that "
            "are not; pass the gradients of good steps."
        )
    return jnp.asarray(whole)


def _families(like: jax.ShapeDtypeStruct, rows: list[CodecSearchRow]) -> list[Family]:
    """What is tried after the filled messages: the best basis among their rows, and no basis."""
    best = _chain.stages(rows[0].codec)[0] if rows else Identity()
    basis = best if best in TRANSFORMS else Identity()
    counted = [functools.partial(_counted, basis, bits, like) for bits in LEVEL_BITS]
    return [*counted, *(functools.partial(_dense, codec, like) for codec in DENSE)]


def _in_bytes(
    size: int, like: jax.ShapeDtypeStruct, measure: Callable[[Codec], CodecSearchRow]
) -> list[CodecSearchRow]:
    """What every family makes of so many bytes, the least error first."""

    def measured(families: Sequence[Family]) -> list[CodecSearchRow]:
        codecs = [codec for family in families if (codec := family(size)) is not None]
        return sorted(map(measure, codecs), key=lambda row: (row.error, row.bytes))

    filled = measured(FILLED)
    others = measured(_families(like, filled))
    return sorted([*filled, *others], key=lambda row: (row.error, row.bytes))


def _filled(basis: Codec, size: int) -> Codec | None:
    return chain(basis, Budget(bytes=(size - 8) // 4 * 4)) if size >= 28 else None


FILLED = tuple(functools.partial(_filled, basis) for basis in TRANSFORMS)


def _counted(basis: Codec, bits: int, like: jax.ShapeDtypeStruct, size: int) -> Codec | None:
    """With as many coefficients as fit."""

    def of(k: int) -> Codec:
        return chain(basis, TopK(k=k), LogLevels(bits=bits))

    few, many = 0, like.shape[0] + 1
    while many - few > 1:
        middle = (few + many) // 2
        fits = wire_bytes(of(middle), like) <= size
        few, many = (middle, many) if fits else (few, middle)
    return of(few) if few else None


def _dense(codec: Codec, like: jax.ShapeDtypeStruct, size: int) -> Codec | None:
    return codec if wire_bytes(codec, like) <= size else None


def _within(
    error: float, like: jax.ShapeDtypeStruct, measure: Callable[[Codec], CodecSearchRow]
) -> list[CodecSearchRow]:
    """Of each family the smallest within the error, if smaller than those before; the best first.

    The sizes are in steps of a quarter of an octave.
    """
    dense = wire_bytes(Identity(), like)
    steps = range(SIZES_PER_OCTAVE * OCTAVES)
    sizes = [math.ceil(dense * 2 ** (-step / SIZES_PER_OCTAVE)) for step in steps]
    rows = [measure(Identity())]

    def tried(family: Family, step: int) -> CodecSearchRow | None:
        codec = family(sizes[step]) if step < len(sizes) else None
        row = None if codec is None else measure(codec)
        return row if row is not None and row.error <= error else None

    def improve(families: Sequence[Family], best: int) -> int:
        for family in families:
            if (good := tried(family, best + 1)) is None:
                continue
            best, high = best + 1, len(sizes)
            while high - best > 1:
                middle = (best + high) // 2
                if row := tried(family, middle):
                    best, good = middle, row
                else:
                    high = middle
            rows.insert(0, good)
        return best

    improve(_families(like, rows), improve(FILLED, 0))
    return rows


def _measure(sample: jax.Array, like: jax.ShapeDtypeStruct, codec: Codec) -> CodecSearchRow:
    step = Step.of(0)

    @jax.jit
    def lost(row: jax.Array) -> jax.Array:
        return row - decompress(codec, compress(codec, row, step=step), like, step=step)

    rows = [np.asarray(lost(row), np.float64) for row in sample]
    whole = np.linalg.norm(np.asarray(sample, np.float64))
    return CodecSearchRow(codec, wire_bytes(codec, like), float(np.linalg.norm(rows) / whole))
