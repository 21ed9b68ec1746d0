"""Resharding of states for another number of workers or another method."""

import math
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, get_args
from urllib.parse import quote

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from fftgrad._contracts import PyTree
from fftgrad._values import check, check_choice
from fftgrad.checkpoint import _sums
from fftgrad.exchanges._shards import PerWorker

Array = npt.NDArray[np.generic]
Missing = Literal["refuse", "zero"]
Policy = Literal["keep", "mean", "cut", "reset", "index"]
"""Rule for a leaf if the number of workers changes.

keep   leaf that is equal on all workers: keep
mean   a row for each worker: redistribute the rows, with the same mean
cut    a shard for each worker: join the shards, and cut them into the new number
reset  state that fits one number of workers only: use the fresh leaf
index  numbers of the workers: use the fresh leaf
"""


Path: TypeAlias = tuple[str, ...]
(ROWS,) = PerWorker._fields
CUT = "cut_sizes", "cut_number"
COUNTS = "step", "skipped", "overflow"


class Mark(NamedTuple):
    """Rule for a leaf, derived from its path."""

    policy: Policy
    learned: bool = False  # True if the leaf may start fresh without a warning
    size: int = 0  # number of values of the whole part, if the leaf has shards of it
    pieces: int = 0  # number of shards of each part


class Leaf(NamedTuple):
    """Description of a leaf of a state."""

    mark: Mark
    shape: tuple[int, ...]  # includes the rows of all workers
    dtype: str
    # reads the values into a sharding, or to the host for None; reads the data of PRNG keys
    read: Callable[[jax.sharding.Sharding | None], Array | jax.Array]

    @property
    def is_key(self) -> bool:
        return self.dtype.startswith("key<")

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Resharded(NamedTuple):
    """Result of `reshard_state`.

    Attributes:
      state: the state for the new number of workers.
      workers: the old and the new number of workers.
    """

    state: Any
    workers: tuple[int, int]


def reshard_state(state: PyTree, to: PyTree, *, missing: Missing = "refuse") -> Resharded:
    """Function: convert a state for another number of workers or another method.

    State for each of N old workers is a row r_i, and becomes rows r'_j of M new workers:

        r'_j = Σ_i M |J_j ∩ I_i| r_i.

    I_i is interval i of N equal intervals of [0, 1], J_j is interval j of M, and |·| is a length.
    The mean of the rows stays, so no residual is lost. Residuals also fit another codec, exchange
    or bucketing.

        state = fg.checkpoint.reshard_state(state, fg.init_state(tx, params, mesh, "data")).state

    | state with a row for each worker | becomes |
    |---|---|
    | residuals and velocities of a memory | redistributed by the equation |
    | moments in `local_state`, sums of `multi_steps` | as residuals |
    | rows that you wrap in `fg.exchanges.PerWorker`, as parameters under `diloco` | as residuals |
    | the groups' residuals in `Hierarchical` | joined, redistributed over the groups, cut again |
    | counters, flags | row j is a copy of r_i, for the first I_i that overlaps J_j |
    | typed PRNG keys | copies like counters, folded with j |
    | state of a codec, such as a threshold | as residuals |
    | state of a shard's codec, in `TwoStage` and `Hierarchical` | fresh |

    Replicated state is kept. State of an exchange, such as PowerSGD's factors, starts fresh if its
    shape does not fit. The host converts one leaf at a time.

    Args:
      state: any tree that contains a state of `fg.init_state`, on devices of this process. With
        several processes, use `save` and `restore` instead.
      to: a fresh tree with the structure, shapes, dtypes and shardings of the result.
      missing: "refuse" raises an error if a leaf is missing, left over or of another shape. "zero"
        warns, uses the fresh leaf of `to`, and drops leaves that `to` lacks.

    Claims: the mean of the residuals stays, up to one rounding of each value. If M is a multiple of
      N, each new row is an exact copy of an old row.

    Raises:
      ValueError: with "refuse", if a leaf is missing, left over or of another shape.

    Example:
      >>> tx = fg.compressed_pmean(fg.AllReduce(), fg.ErrorFeedback(), axis_name="data")
      >>> old, new = (jax.make_mesh((n,), ("data",), devices=jax.devices()[:n]) for n in (2, 1))
      >>> state = fg.init_state(tx, {"w": jnp.zeros(3)}, old, "data")
      >>> fresh = fg.init_state(tx, {"w": jnp.zeros(3)}, new, "data")
      >>> fg.checkpoint.reshard_state(state, fresh).workers
      (2, 1)
    """
    old = describe(state)
    leaves = zip(old, jax.tree.leaves(state), strict=True)
    here = {n: a for n, a in leaves if getattr(a, "is_fully_addressable", False)}
    _sums.check_copies(here, "reshard_state")
    return lay_out(old, to, missing, "reshard_state")


def lay_out(old: Mapping[str, Leaf], into: PyTree, missing: Missing, owner: str) -> Resharded:
    """Return a tree like `into` with the leaves of an old state."""
    check_choice(f"{owner}(missing)", missing, get_args(Missing))
    new = describe(into)
    workers = _workers_of(old), _workers_of(new)
    carriers = {name: _carried(old[name], new[name], *workers) for name in new if name in old}
    unlike = [
        f"{n} must be {new[n]}, got {old.get(n, 'nothing')}"
        for n in new
        # A fresh leaf with rule "cut" may start at zero, without an old leaf of this name.
        if carriers.get(n) is None
        and not new[n].mark.learned
        and (n in old or new[n].mark.policy in ("keep", "mean"))
    ]
    unlike += [f"{n} has no place" for n in old if n not in new and not old[n].mark.learned]
    said = "; ".join(unlike[:4]) + (f"; and {len(unlike) - 4} more" if len(unlike) > 4 else "")
    rule, fine = "have the leaves of the new state", not unlike or missing != "refuse"
    remedy = "wrap rows of workers in fg.exchanges.PerWorker, or pass missing='zero'."
    check(fine, f"{owner}(state)", rule, f"others: {said}", remedy)
    if unlike:
        warnings.warn(f"{owner}(missing='zero'): {said}.", RuntimeWarning, stacklevel=3)

    def placed(name: str, like: Any) -> Any:
        carry = carriers.get(name)
        # NumPy has no dtype for PRNG keys, so an empty array of keys comes from `into`.
        no_keys = new[name].is_key and not math.prod(new[name].shape)
        return like if carry is None or no_keys else _placed(carry(_sharding(like)), like)

    leaves = [placed(*pair) for pair in zip(new, jax.tree.leaves(into), strict=True)]
    tree = jax.tree.unflatten(jax.tree.structure(into), leaves)
    return Resharded(tree, workers)


def _carried(old: Leaf, new: Leaf, before: int, after: int) -> Callable[[Any], Any] | None:
    """Return the conversion from the old leaf to the new one; None if the leaf starts fresh."""
    floats, policy = all("float" in leaf.dtype for leaf in (old, new)), old.mark.policy
    if old.dtype != new.dtype and not (floats and policy != "keep"):
        return None
    same = before == after and old.mark.pieces == new.mark.pieces
    if same or policy == new.mark.policy == "keep":
        return old.read if old.shape == new.shape else None
    if policy != new.mark.policy or policy in ("index", "reset"):
        return None
    if policy == "cut":
        size, pieces = old.mark.size, new.mark.pieces
        shape = (old.shape[0] // before * after, -(-size // pieces), *old.shape[2:])
        fits = new.mark.size in (0, size) and after % pieces == 0 and new.shape == shape
        return (lambda _: _cut_again(old, pieces, before, after)) if fits else None
    if old.shape[1:] != new.shape[1:] or new.shape[0] * before != old.shape[0] * after:
        return None
    return lambda _: _spread(old, before, after)


def _of_each(leaf: Leaf, workers: int) -> Array:
    """Return the rows of the workers, [N, m, ...], with m shards over other mesh axes."""
    rows = np.asarray(leaf.read(None))
    return rows.reshape(workers, len(rows) // workers, *rows.shape[1:])


def _joined(rows: Array) -> Array:
    return rows.reshape(rows.shape[0] * rows.shape[1], *rows.shape[2:])  # -1 fails if empty


def _spread(old: Leaf, before: int, after: int) -> Array:
    flat = _joined(spread(_of_each(old, before), after))
    if not old.is_key:
        return flat
    keys = jax.random.wrap_key_data(
        jnp.asarray(flat), impl=old.dtype.removeprefix("key<").removesuffix(">")
    )
    return np.asarray(jax.random.key_data(jax.vmap(jax.random.fold_in)(keys, np.arange(len(keys)))))


def _cut_again(old: Leaf, pieces: int, before: int, after: int) -> Array:
    rows = np.moveaxis(_of_each(old, before), 1, 2)  # [N, s, m, ...]
    groups = rows.reshape(-1, old.mark.pieces, *rows.shape[1:])
    joined = spread(np.stack([join(g, old.mark.size) for g in groups]), after // pieces)
    return _joined(np.moveaxis(np.concatenate([cut(group, pieces) for group in joined]), 2, 1))


def spread(rows: Array, workers: int) -> Array:
    """Redistribute rows [N, ...] to M workers, [M, ...], by the equation of `reshard_state`.

    For integers and flags, row j is a copy of r_i, for the first I_i that overlaps I_j.
    """
    before = len(rows)
    if not jnp.issubdtype(rows.dtype, jnp.inexact):
        return rows[[j * before // workers for j in range(workers)]]
    wide = np.complex128 if np.issubdtype(rows.dtype, np.complexfloating) else np.float64
    out = np.empty((workers, *rows.shape[1:]), rows.dtype)
    i, j = np.arange(before), np.arange(workers)[:, None]  # intervals of 1 / (before · workers)
    common = np.minimum((j + 1) * before, (i + 1) * workers) - np.maximum(j * before, i * workers)
    for number, shares in enumerate(np.maximum(common, 0) / before):
        met = np.flatnonzero(shares)
        total = sum(shares[k] * rows[k].astype(wide) for k in met)
        # If I_j overlaps one I_i only, copy the row exactly.
        out[number] = rows[met[0]] if len(met) == 1 else np.asarray(total).astype(rows.dtype)
    return out


def join(rows: Array, size: int) -> Array:
    """Join shards [w, s, ...] to a vector [size, ...]: the inverse of `cut`."""
    least, longer = divmod(size, len(rows))
    return np.concatenate([row[: least + (i < longer)] for i, row in enumerate(rows)])


def cut(joined: Array, shards: int) -> Array:
    """Cut a vector [n, ...] into shards [w, ceil(n / w), ...], padded as in the exchanges.

    The padding repeats the last value of a shard, or is zero if the shard is empty.
    """
    size = -(-len(joined) // shards)

    def filled(part: Array) -> Array:
        rest = [(0, size - len(part)), *((0, 0) for _ in part.shape[1:])]
        return np.pad(part, rest, mode="edge" if len(part) else "constant")

    return np.stack([filled(part) for part in np.array_split(joined, shards)])


def _sharding(like: Any) -> jax.sharding.Sharding | None:
    """Return the sharding of a fresh leaf; None if JAX may choose one."""
    if (isinstance(like, jax.Array) and not like.committed) or not hasattr(like, "dtype"):
        return None
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return None
    return getattr(like, "sharding", None)


def _placed(values: Array | jax.Array, like: Any) -> Any:
    """Convert the values to the type, dtype and sharding of `like`."""
    if isinstance(like, np.generic):
        return values.astype(like.dtype)[()]
    if isinstance(like, bool | int | float | complex):
        return type(like)(values)
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        keys = jax.random.wrap_key_data(jnp.asarray(values), impl=jax.random.key_impl(like))
        return jax.device_put(keys, like.sharding)
    values = values.astype(like.dtype, copy=False)
    sharding = _sharding(like)
    if isinstance(values, jax.Array):
        return values
    if sharding is None:
        return jnp.asarray(values) if isinstance(like, jax.Array) else values
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def _workers_of(leaves: Mapping[str, Leaf]) -> int:
    """Return the number of workers of a state. Without rows of workers, return 1."""
    rows = [(leaf.mark.policy, leaf.shape[0]) for leaf in leaves.values() if leaf.shape]
    known = (n for policy in ("index", "mean", "reset") for own, n in rows if own == policy)
    return next(known, 1)


def describe(tree: PyTree) -> dict[str, Leaf]:
    """Describe the leaves of a tree by path, in tree order."""
    named = {_texts(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
    # An NNX variable is a tree node with the array in a field `value`, which paths leave out.
    leaves = {path[:-1] if path[-1:] == ("value",) else path: leaf for path, leaf in named.items()}
    ours = {path[:-1] for path in leaves if all((*path[:-1], name) in leaves for name in COUNTS)}
    out: dict[str, Leaf] = {}
    for name, (path, leaf) in zip(named, leaves.items(), strict=True):
        is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        dtype = f"key<{jax.random.key_impl(leaf)}>" if is_key else str(jnp.result_type(leaf))
        read = _reader(jax.random.key_data(leaf) if is_key else leaf)
        out[".".join(name)] = Leaf(_mark(path, leaves, ours), jnp.shape(leaf), dtype, read)
    return out


def _texts(path: tuple[Any, ...]) -> Path:
    """Write a path as texts. Keys, positions and fields of all containers look the same."""
    texts = (jax.tree_util.keystr((key,), simple=True) for key in path)
    return tuple(quote(text, safe=" ").replace(".", "%2E") for text in texts)


def _mark(path: Path, leaves: Mapping[Path, Any], ours: Collection[Path]) -> Mark:
    """Return the rule for a leaf from the names in its path.

    The names stay if a framework stores named tuples as dicts. `ours` are the paths of the states
    of `compressed_pmean`, which `describe` finds by their counters.
    """
    states = (i for i in range(len(path)) if path[:i] in ours)
    start = next(states, len(path))
    # The state of an exchange contains no unsent values, except in `cut_rows`.
    learned = path[start : start + 1] == ("exchange",)
    if ROWS not in path:
        return Mark("keep", learned)
    inside = path[path.index(ROWS) + 1 :]
    if path[start:] == ("worker", ROWS):
        return Mark("index", learned=True)
    if path[start : start + 2] == ("memory", ROWS):  # a counter contains no unsent values
        return Mark("mean", not jnp.issubdtype(jnp.result_type(leaves[path]), jnp.inexact))
    marks = [i for i, name in enumerate(inside) if name in ("reset_rows", "cut_rows", *CUT)]
    if not marks:
        return Mark("mean", learned)
    outer = path[: len(path) - len(inside) + marks[0]]
    sizes, number = (_values(leaves.get((*outer, name))) for name in CUT)
    pieces = 0 if number is None else int(number.flat[0])
    if inside[marks[0]] != "cut_rows":
        return Mark("reset", learned and "cut_rows" not in inside, pieces=pieces)
    parts = [int(name) for name in inside[marks[0] :] if name.isdigit()]
    size = 0 if sizes is None else int(sizes.reshape(-1, sizes.shape[-1])[0, (parts or [0])[-1]])
    return Mark("cut", size=size, pieces=pieces)


def _values(leaf: Any) -> Array | None:
    """Return local rows of an array with equal rows; None if the leaf has a shape but no values."""
    if isinstance(leaf, jax.Array):
        leaf = leaf.addressable_shards[0].data
    return np.asarray(leaf) if isinstance(leaf, np.ndarray | jax.Array) else None


def _reader(leaf: Any) -> Callable[[Any], Array | jax.Array]:
    def read(sharding: jax.sharding.Sharding | None) -> Array | jax.Array:
        is_placed = sharding is not None and isinstance(leaf, jax.Array)
        return jax.device_put(leaf, sharding) if is_placed else np.asarray(leaf)

    return read
