"""The leaves of an old state as those of a new one."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from fftgrad._contracts import PyTree
from fftgrad._values import check_choice
from fftgrad.checkpoint import _leaves, _rows
from fftgrad.checkpoint._leaves import Leaf
from fftgrad.checkpoint._rows import Array

Missing = Literal["refuse", "zero"]


class Resharded(NamedTuple):
    """What `reshard_state` returns.

    Attributes:
      state: the state, for the new number of workers.
      workers: the numbers of workers before and after.
      lost: the norm of what lost workers had not sent yet, over that of what all had not.
      anew: the leaves that start as in a fresh state.
      left: the leaves of the old state that the new one has no place for.
    """

    state: Any
    workers: tuple[int, int]
    lost: float
    anew: tuple[str, ...]
    left: tuple[str, ...]


_KEPT_ELSEWHERE = ("shards", "fixed")
"""What an exchange keeps beside the memory: an exchange that has it starts with none."""


class Plan(NamedTuple):
    """How many workers there were and will be, and which of the old ones are left."""

    before: int
    after: int
    alive: list[int]

    @property
    def same(self) -> bool:
        return self.before == self.after == len(self.alive)


def numbers(lost: Iterable[int], owner: str) -> tuple[int, ...]:
    """Those of the lost workers."""
    if isinstance(lost, int | np.integer | np.ndarray | jax.Array) and not np.ndim(lost):
        raise TypeError(f"{owner}(lost): must be a list of workers, got {lost}; use [{lost}].")
    return tuple(lost)


def lay_out(
    old: Mapping[str, Leaf], into: PyTree, lost: tuple[int, ...], missing: Missing, owner: str
) -> Resharded:
    """The leaves of an old state as a tree like `into`."""
    check_choice(f"{owner}(missing)", missing, get_args(Missing))
    old, new = _leaves.with_rows(old), _leaves.with_rows(_leaves.describe(into, owner))
    before, after = _leaves.workers_of(old), _leaves.workers_of(new)
    if all(leaf.kind in _leaves.ROWLESS for leaf in old.values()):
        lost = ()  # they had nothing of their own
    plan = Plan(before, after, [i for i in range(before) if i not in lost])
    if not plan.alive or not set(lost) <= set(range(before)):
        raise ValueError(
            f"{owner}(lost): must be some of the workers 0 to {before - 1}, and not all, got "
            f"{lost}; use (0,), or start from fg.init_state."
        )
    carriers = {name: _carried(old[name], new[name], plan) for name in new if name in old}
    anew = tuple(name for name in new if carriers.get(name) is None)
    left = tuple(name for name in old if name not in new)
    unlike = [
        _unlike(n, old.get(n), new[n])
        for n in anew
        if new[n].kind not in _leaves.LEARNED and (n in old or new[n].kind not in _KEPT_ELSEWHERE)
    ]
    unlike += [f"{n} has no place" for n in left if old[n].kind not in _leaves.LEARNED]
    said = "; ".join(unlike[:4]) + (f"; and {len(unlike) - 4} more" if len(unlike) > 4 else "")
    if unlike and missing == "refuse":
        remedy = (
            "make the new one as the old one was made, or pass missing='zero' to start these anew"
        )
        if any(_like_rows(old.get(name), new[name], plan) for name in anew):
            remedy = (
                "if these are the parameters of workers that train on their own, leave them out, "
                "make them of what all have in common, of diloco's by jax.tree.map(lambda a: "
                "jnp.broadcast_to(a, (workers, *a.shape)), state.anchor), and wrap them as "
                "fg.exchanges.PerWorker(rows) where they are saved; else make the new one as the "
                "old one was"
            )
        raise ValueError(
            f"{owner}(state): must have the leaves of the new one, got others: {said}; {remedy}."
        )
    if unlike:
        warnings.warn(f"{owner}(missing='zero'): {said}.", RuntimeWarning, stacklevel=3)

    def no_keys(name: str) -> bool:  # which the host has no dtype for
        return new[name].is_key and not math.prod(new[name].shape)

    leaves = [
        like if (carry := carriers.get(name)) is None or no_keys(name) else carry(like)
        for name, like in zip(new, jax.tree.leaves(into), strict=True)
    ]
    share = _lost_share(old, plan) if lost else 0.0
    tree = jax.tree.unflatten(jax.tree.structure(into), leaves)
    return Resharded(tree, (before, after), share, anew, left)


def _carried(old: Leaf, new: Leaf, plan: Plan) -> Callable[[Any], Any] | None:
    """How to make the new leaf from a fresh one; None if it must start anew."""
    has_rows = old.kind not in _leaves.ROWLESS
    if old.kind != new.kind or not (old.dtype == new.dtype or (has_rows and _floats(old, new))):
        return None
    if not has_rows or (plan.same and old.pieces == new.pieces):
        if old.shape != new.shape:
            return None
        return lambda like: _placed(old.read(_sharding(like)), like)
    if old.kind in ("cut", "seen", "shard warm", "fixed"):
        return None
    if old.kind == "shards":
        pieces = new.pieces
        if new.size not in (0, old.size) or plan.after % pieces:
            return None
        if new.shape != shape_of_shards(old, pieces, plan):
            return None
        return lambda like: _placed(_new_shards(old, pieces, plan), like)
    if old.shape[1:] != new.shape[1:] or new.shape[0] * plan.before != old.shape[0] * plan.after:
        return None
    return lambda like: _placed(_spread(old, plan), like)


def shape_of_shards(old: Leaf, pieces: int, plan: Plan) -> tuple[int, ...]:
    rows = old.shape[0] // plan.before * plan.after
    return (rows, -(-old.size // pieces), *old.shape[2:])


def _floats(*leaves: Leaf) -> bool:
    return all("float" in leaf.dtype for leaf in leaves)


def _of_each(leaf: Leaf, plan: Plan) -> Array:
    """The rows of each worker: [N, m, ...], for m shards of model axes."""
    rows = leaf.on_host()
    return rows.reshape(plan.before, len(rows) // plan.before, *rows.shape[1:])


def _joined(rows: Array) -> Array:
    """Those of all workers, one after the other; there may be no value in them."""
    return rows.reshape(rows.shape[0] * rows.shape[1], *rows.shape[2:])


def _spread(old: Leaf, plan: Plan) -> Array:
    rows = _rows.spread(_of_each(old, plan)[plan.alive], plan.after)
    flat = _joined(rows)
    if not old.is_key:
        return flat
    keys = jax.random.wrap_key_data(
        jnp.asarray(flat), impl=old.dtype.removeprefix("key<").removesuffix(">")
    )
    return np.asarray(jax.random.key_data(jax.vmap(jax.random.fold_in)(keys, np.arange(len(keys)))))


def _without_lost(old: Leaf, plan: Plan) -> Array:
    """The rows [N, s, m, ...], zero for those that are lost."""
    rows = np.moveaxis(_of_each(old, plan), 1, 2).copy()
    rows[[i for i in range(plan.before) if i not in plan.alive]] = 0
    return rows


def _new_shards(old: Leaf, pieces: int, plan: Plan) -> Array:
    rows = _without_lost(old, plan)
    groups = rows.reshape(-1, old.pieces, *rows.shape[1:])
    joined = np.stack([_rows.join(group, old.size) for group in groups])
    after = _rows.spread(joined, plan.after // pieces)
    rows = np.moveaxis(np.concatenate([_rows.cut(group, pieces) for group in after]), 2, 1)
    return _joined(rows)


def _sharding(like: Any) -> jax.sharding.Sharding | None:
    """Where a fresh leaf is bound to be."""
    if (isinstance(like, jax.Array) and not like.committed) or not hasattr(like, "dtype"):
        return None
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return None
    return getattr(like, "sharding", None)


def _placed(values: Array | jax.Array, like: Any) -> Any:
    """The values, where `like` is, in its dtype."""
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


def _unlike(name: str, old: Leaf | None, new: Leaf) -> str:
    wanted = f"{new.dtype}{list(new.shape)}"
    return f"{name} must be {wanted}, got " + (
        "nothing" if old is None else f"{old.dtype}{list(old.shape)}"
    )


def _like_rows(old: Leaf | None, new: Leaf, plan: Plan) -> bool:
    """Whether it has an axis as long as there are workers, before and after."""
    if old is None or plan.same or old.shape[1:] != new.shape[1:]:
        return False
    return (old.kind, old.shape[:1], new.shape[:1]) == ("shared", (plan.before,), (plan.after,))


def _lost_share(old: Mapping[str, Leaf], plan: Plan) -> float:
    """The norm of the rows of lost workers, over that of all."""
    gone = total = 0.0
    for leaf in old.values():
        if leaf.kind in ("residual", "shards") and _floats(leaf):
            rows = _of_each(leaf, plan).astype(np.float64).reshape(plan.before, -1)
            squares = np.sum(rows * rows, axis=1)
            total += float(np.sum(squares))
            gone += float(np.sum(np.delete(squares, plan.alive)))
    return math.sqrt(gone / total) if total else 0.0
