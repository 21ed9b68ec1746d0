"""Save, load and analyze gradients."""

import bisect
import functools
import math
import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

import fftgrad as fg
from fftgrad._contracts import PyTree
from fftgrad._values import check, check_type, local_path
from fftgrad.ops._shapes import by_path
from fftgrad.planning._text import table

Array = npt.NDArray[Any]
NAME = re.compile(r"step=(\d+)/worker=(\d+)/(.*)", re.DOTALL)
"""The name of an array in a file: step, worker, and the path of the leaf."""


class GradientLog(NamedTuple):
    """Gradients of some steps and workers.

    Attributes:
      gradients: {step: {worker: gradient}}, with numbers of steps and workers. A gradient is a tree
        of arrays.
    """

    gradients: Mapping[int, Mapping[int, PyTree]]

    @property
    def steps(self) -> tuple[int, ...]:
        """The numbers of the steps."""
        return tuple(self.gradients)

    @property
    def trees(self) -> list[PyTree]:
        """The gradients of all steps and workers."""
        return [tree for workers in self.gradients.values() for tree in workers.values()]


def save_gradients(path: str | os.PathLike[str], log: GradientLog) -> None:
    """Function: write gradients to an .npz file.

    The name of an array is like step=100/worker=3/layers/0/w: step, worker, and the path of the
    leaf. bfloat16 is stored as float32, because NumPy has no bfloat16.

    Args:
      path: the file; `~` is the home folder. The suffix .npz is added if it is missing.
      log: the gradients. With several processes, each saves its workers to its own file.

    Example:
      >>> import tempfile
      >>> import numpy as np
      >>> file = tempfile.mkdtemp() + "/gradients.npz"
      >>> log = fg.planning.GradientLog({10: {0: {"w": np.ones(2, np.float32)}}})
      >>> fg.planning.save_gradients(file, log)
      >>> list(np.load(file))
      ['step=10/worker=0/w']
    """
    saved: dict[str, Array] = {}
    for step, workers in log.gradients.items():
        for worker, tree in workers.items():
            for name, leaf in by_path(tree).items():
                own = np.asarray(leaf)
                own = own.astype(np.float32) if own.dtype == jnp.bfloat16 else own
                saved[f"step={step}/worker={worker}/{name}"] = own
    write: Any = np.savez
    write(local_path("save_gradients(path)", path), **saved)


def load_gradients(*paths: str | os.PathLike[str]) -> GradientLog:
    """Function: read gradients from .npz files.

    Args:
      *paths: files of `fg.planning.save_gradients`, such as one per process; or one .npz file of
        other arrays, which is read as the gradient of step 0 and worker 0. Arrays of integers are
        left out.

    Returns:
      A `GradientLog`. Each gradient is a dict from paths to arrays.

    Raises:
      ValueError: if a file cannot be read, or two files have the same gradient.

    Example:
      >>> import tempfile
      >>> import numpy as np
      >>> file = tempfile.mkdtemp() + "/gradients.npz"
      >>> log = fg.planning.GradientLog({10: {0: {"a": {"b": np.ones(2)}}}})
      >>> fg.planning.save_gradients(file, log)
      >>> fg.planning.load_gradients(file).gradients
      {10: {0: {'a/b': array([1., 1.])}}}
    """
    found: dict[int, dict[int, dict[str, Array]]] = {}
    for path in paths:
        for name, array in _arrays(path).items():
            match = NAME.fullmatch(name)
            step, worker, leaf = match.groups() if match else (0, 0, name)
            tree = found.setdefault(int(step), {}).setdefault(int(worker), {})
            rule = "have gradients that the files before it do not have"
            got = f"{leaf!r} of step {step} and worker {worker} again"
            check(leaf not in tree, f"load_gradients({path})", rule, got, "pass each file once.")
            tree[leaf] = array
    return GradientLog({step: dict(sorted(found[step].items())) for step in sorted(found)})


def _arrays(path: str | os.PathLike[str]) -> dict[str, Array]:
    """Read the floating-point arrays of an .npz file by their names."""
    file = local_path("load_gradients(*paths)", path)
    with file.open("rb") as opened:  # errors of `open` name the file
        try:
            loaded: Any = np.load(opened, allow_pickle=False)
            found = {name: loaded[name] for name in loaded.files}
        except Exception as error:  # NumPy does not document the errors of a damaged file
            raise ValueError(
                f"load_gradients({path}): must be a whole .npz file of arrays, got other content; "
                "save it again by fg.planning.save_gradients or np.savez(file, **arrays)."
            ) from error
    # NumPy saves bfloat16 as unnamed two-byte values (V2).
    found = {k: x.view(jnp.bfloat16) if x.dtype == np.dtype("V2") else x for k, x in found.items()}
    return {k: x for k, x in found.items() if jnp.issubdtype(x.dtype, jnp.floating)}


BLOCK = 4096
"""Length of a sampled block. Blocks keep neighboring values together, as transforms need them."""
KEPT = (0.1, 0.01, 0.001)
"""Shares of the coefficients that are kept. A complex coefficient counts as two."""
SHARE = 0.01
"""Share of the values that count as large."""
BASES: dict[str, fg.codecs.Codec] = {
    "none": fg.codecs.Identity(),
    "Dct 16": fg.Dct(block=16),
    "Dct 64": fg.Dct(block=64),
    "Fft 64": fg.Fft(block=64),
    "Fft 4096": fg.Fft(block=4096),
    "Fft whole": fg.Fft(block=None),
    "Hadamard": fg.Hadamard(),
}
DENSE = (
    fg.Sign(),
    *(fg.chain(fg.Hadamard(), fg.codecs.LloydMax(bits=bits)) for bits in (1, 2, 3, 4)),
    fg.Cast("bfloat16"),
)
"""Codecs that send every value in a few bits."""


class Rate(NamedTuple):
    """The bytes and the error of a codec on the sample.

    Attributes:
      codec: the codec, for a gradient of any size.
      ratio: minimum ratio of float32 bytes to payload bytes.
      bits: bits sent per value.
      error: relative L2 error.
    """

    codec: fg.codecs.Codec
    ratio: float
    bits: float
    error: float

    @property
    def is_dense(self) -> bool:
        """True if the codec sends every value in a few bits."""
        return self.codec in DENSE


class Analysis(NamedTuple):
    """The result of `fg.planning.analyze`. `print` shows the recommendation.

    Attributes:
      values: number of values in one gradient.
      sampled: number of values measured per step and worker: all, or blocks of 4,096.
      dropped: for each basis, the relative errors of keeping the largest 10 %, 1 % and 0.1 % of the
        coefficients, where a complex coefficient counts as two.
      overlap: share of the positions of the largest 1 % that two workers have in common; 0.01 by
        chance, None for one worker.
      cosine: cosine of the gradients of two workers in one step; None for one worker.
      rates: bytes and errors of codecs, highest ratio first, and by error within a ratio.
      recommendation: sentences, each with the figures that support it.
    """

    values: int
    sampled: int
    dropped: Mapping[str, Array]
    overlap: float | None
    cosine: float | None
    rates: tuple[Rate, ...]
    recommendation: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self.recommendation)


def analyze(
    gradients: PyTree, *, max_values: int = 1 << 22, ratios: Sequence[float] = (100, 30, 7.5)
) -> Analysis:
    """Function: measure gradients, and recommend a basis, a codec and an exchange.

    docs/api/planning.md explains the figures. If all gradients together have more than `max_values`
    values, it samples blocks of 4,096 values, at the same random positions in each gradient, by a
    fixed seed. Codecs are measured on all leaves as one vector. Three ratios take most of a minute
    on a CPU.

    Args:
      gradients: a `GradientLog`, such as the result of `fg.planning.load_gradients`, or one
        gradient, a tree of arrays. All are cast to float32.
      max_values: number of values to measure over all steps and workers, at least 4,096.
      ratios: ratios of float32 bytes to payload bytes at which codecs are measured; () measures no
        codecs.

    Returns:
      An `Analysis`.

    Example:
      >>> import numpy as np
      >>> wave = np.sin(np.arange(8192, dtype=np.float32) / 9)
      >>> found = fg.planning.analyze({"w": wave}, ratios=())
      >>> found.recommendation[0][:35]
      'Transform by Fft(block=None) before'
    """
    log = gradients if isinstance(gradients, GradientLog) else GradientLog({0: {0: gradients}})
    keys = [(step, worker) for step, workers in log.gradients.items() for worker in workers]
    sizes = {name: np.size(x) for tree in log.trees[:1] for name, x in by_path(tree).items()}
    columns = _columns(sum(sizes.values()), max_values // max(1, len(keys)))
    rows = np.stack([_row(tree, sizes, columns) for tree in log.trees] or [np.zeros(0, np.float32)])
    fine, got = bool(rows.any() and np.isfinite(rows).all()), "other values or none"
    rule, remedy = "be finite in float32 and not all zero", "leave that step out."
    check(fine, "analyze(gradients)", rule, got, remedy)
    # Scale by a power of two, which is exact, so that squares neither overflow nor underflow.
    rows = np.ldexp(rows, -np.frexp(np.max(np.abs(rows)))[1])
    n = columns.size
    dropped = {
        name: _dropped(np.stack([np.asarray(_transformed(basis, row)) for row in rows]), n)
        for name, basis in BASES.items()
    }
    steps = np.asarray([step for step, _ in keys])
    groups = [own for step in log.steps if len(own := rows[steps == step]) > 1]
    compact = min(("none", "Dct 16", "Dct 64", "Fft 64"), key=lambda name: dropped[name][1])
    found = Analysis(
        values=sum(sizes.values()),
        sampled=n,
        dropped=dropped,
        overlap=float(np.mean([_overlap(own) for own in groups])) if groups else None,
        cosine=float(np.mean([_cosine(own) for own in groups])) if groups else None,
        rates=_rates(rows, ratios, BASES[compact]),
    )
    return found._replace(recommendation=tuple(_sentences(found)))


def _columns(values: int, most: int) -> Array:
    """Choose the positions of the sample: all, or one random block in each of equal ranges."""
    blocks = -(-values // BLOCK)
    count = max(1, most // BLOCK)
    edges = np.arange(count + 1) * blocks // count
    if blocks <= count:
        return np.arange(values)
    chosen = np.random.default_rng(0).integers(edges[:-1], edges[1:])
    columns = (chosen[:, None] * BLOCK + np.arange(BLOCK)).ravel()
    return columns[columns < values]


def _row(tree: PyTree, sizes: Mapping[str, int], columns: Array) -> Array:
    """Return the sampled values of one gradient, in float32."""
    leaves = {name: np.asarray(x) for name, x in by_path(tree).items()}
    same = {name: x.size for name, x in leaves.items()} == sizes
    remedy = "pass gradients of one model."
    check(same, "analyze(gradients)", "be trees of one structure", "others", remedy)
    bad = [name for name, x in leaves.items() if not jnp.issubdtype(x.dtype, jnp.floating)]
    check_type(not bad, "analyze(gradients)", "be floating-point", bad, "leave them out.")
    with np.errstate(over="ignore"):  # `analyze` refuses values that become infinite
        whole = [x.ravel().astype(np.float32) for x in leaves.values()]
    return np.concatenate([np.zeros(0, np.float32), *whole])[columns]


@functools.partial(jax.jit, static_argnums=0)
def _transformed(basis: fg.codecs.Codec, row: jax.Array) -> jax.Array:
    return basis.compress(row, (), fg.Step.of(0)).payload.main


def _dropped(coefficients: Array, values: int) -> Array:
    """Relative errors of keeping the largest coefficients of each row, at each of `KEPT`."""
    energy = np.sort(np.square(np.abs(coefficients)), axis=1)[:, ::-1]
    reals = 2 if np.iscomplexobj(coefficients) else 1
    counts = [max(1, math.ceil(share * values) // reals) for share in KEPT]
    lost = [np.sum(energy[:, count:], dtype=np.float64) for count in counts]
    return np.sqrt(np.asarray(lost) / (np.sum(energy, dtype=np.float64) or 1.0))


def _overlap(rows: Array) -> float:
    """Return the share of positions of large values that two workers share, over all pairs."""
    count, n = rows.shape
    few = n - math.ceil(SHARE * n)
    large = np.argpartition(np.abs(rows), few, axis=1)[:, few:]
    hits = np.bincount(large.ravel(), minlength=n)
    return float(np.sum(hits * (hits - 1)) / ((count - 1) * large.size))


def _cosine(rows: Array) -> float:
    """Return the mean cosine of two workers, over all pairs."""
    unit = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
    count = len(rows)
    return float((np.sum(np.square(np.sum(unit, axis=0))) - count) / (count * (count - 1)))


def _rates(rows: Array, ratios: Sequence[float], basis: fg.codecs.Codec) -> tuple[Rate, ...]:
    """Measure codecs at each ratio; sort by error within a ratio."""
    n, found = rows.shape[1], list[Rate]()
    like = jax.ShapeDtypeStruct((n,), jnp.float32)
    slots = n // 2 if isinstance(basis, fg.Fft) else n

    def largest(k: int) -> fg.codecs.Codec:
        share = min(1.0, float(f"{k / slots:.3g}"))
        return fg.chain(basis, fg.TopK(fraction=share), fg.LogQuantizer(bits=4))

    for ratio in sorted(ratios, reverse=True):
        size = int(4 * n / ratio)
        counts = range(1, slots + 1)
        most = bisect.bisect_right(counts, size, key=lambda k: fg.wire_bytes(largest(k), like))
        bases = dict.fromkeys((fg.codecs.Identity(), basis))
        codecs = [fg.chain(one, fg.Budget(ratio=ratio)) for one in bases]
        codecs += [largest(most)] if most else []
        codecs += [codec for codec in DENSE if fg.wire_bytes(codec, like) <= size]
        own: list[Rate] = []
        for codec in codecs:
            lost = np.linalg.norm([np.asarray(_lost(codec, row), np.float64) for row in rows])
            error = float(lost / np.linalg.norm(rows.astype(np.float64)))
            own.append(Rate(codec, ratio, 8 * fg.wire_bytes(codec, like) / n, error))
        found += sorted(own, key=lambda rate: rate.error)
    return tuple(found)


@functools.partial(jax.jit, static_argnums=0)
def _lost(codec: fg.codecs.Codec, row: jax.Array) -> jax.Array:
    step = fg.Step.of(0)
    return row - fg.decompress(codec, fg.compress(codec, row, step=step), row, step=step)


def _sentences(found: Analysis) -> Iterator[str]:
    """Write the recommendation."""
    usable = [name for name in BASES if name not in ("none", "Hadamard")]  # it is for quantizers
    best = min(usable, key=lambda name: float(found.dropped[name][1]))
    there, here = float(found.dropped[best][1]), float(found.dropped["none"][1])
    if there < 0.97 * here:
        yield (
            f"Transform by {BASES[best]!r} before selecting: the largest 1 % of its coefficients "
            f"leave an error of {there:.3f}, the largest 1 % of the values {here:.3f}."
        )
    else:
        yield (
            f"Use no transform: the largest 1 % of the values leave an error of {here:.3f}, the "
            f"largest 1 % of the best transform's coefficients, {BASES[best]!r}, one of "
            f"{there:.3f}."
        )
    for ratio in dict.fromkeys(rate.ratio for rate in found.rates):
        one, *others = (rate for rate in found.rates if rate.ratio == ratio)
        said = f"At {ratio:g} times fewer bytes than float32 {one.codec!r} loses least: an error of"
        kind = "sparse codec" if one.is_dense else "codec of a few bits for each value"
        other = next((rate for rate in others if rate.is_dense != one.is_dense), None)
        beside = f"; the best {kind}, {other.codec!r}, {other.error:.3f}" if other else ""
        yield f"{said} {one.error:.3f}{beside}."
    if found.overlap is not None and found.cosine is not None:
        share = f"the largest 1 % of two workers share {found.overlap:.0%} of their places"
        if found.overlap >= 0.5:
            yield f"LeaderTopK, or methods.scalecom, pays: {share}, by chance 1%."
        elif found.overlap < 0.2:
            yield f"Let each worker choose its own coefficients, by AllGather: {share}."
        else:
            yield f"LeaderTopK is worth a try, and AllGather is the safe choice: {share}."
        yield (
            f"A relative error below {math.sqrt(max(0.0, 1 - found.cosine)):.2f} is less than the "
            f"noise of one worker's batch: two workers' gradients have a cosine of "
            f"{found.cosine:.3f}."
        )


def show(found: Analysis) -> str:
    """Format all tables and the recommendation."""
    about = f"{found.values:,} values, {found.sampled:,} of them measured"
    if found.overlap is not None:
        about += f"; two workers share {found.overlap:.1%} of the places of their largest 1 %"
        about += f", and their gradients have a cosine of {found.cosine:.3f}"
    bases = [(name, *(f"{e:.3f}" for e in errors)) for name, errors in found.dropped.items()]
    codecs = [
        (repr(rate.codec), f"{rate.ratio:g}", f"{rate.bits:.3g}", f"{rate.error:.3f}")
        for rate in found.rates
    ]
    kept = [f"{share:.1%} kept" for share in KEPT]
    said = [
        f"{about}.\n\nRelative error of keeping the largest coefficients, in each basis",
        table(("basis", *kept), bases),
        "\nCodecs: bits a value, and the relative error",
        table(("codec", "times fewer", "bits", "error"), codecs),
        "",
    ]
    return "\n".join(said + [textwrap.fill(f"- {line}", 80) for line in found.recommendation])
