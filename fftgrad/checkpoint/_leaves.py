"""What each leaf of a state is, to whom it belongs, and how to get it."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

import jax
import jax.numpy as jnp
import numpy as np

from fftgrad._contracts import PyTree
from fftgrad.checkpoint._rows import Array
from fftgrad.exchanges._per_worker import OfShards, PerWorker, is_rows
from fftgrad.exchanges._shards import PerShard, Shards
from fftgrad.training._pmean import CompressedPmeanState
from fftgrad.training._states import is_state

Kind = Literal[
    "shared",
    "own",
    "residual",
    "shards",
    "fixed",
    "warm",
    "own warm",
    "shard warm",
    "cut",
    "seen",
]
"""What a leaf is.

shared      equal on all workers
own         a row for each worker
residual    the same, of a memory: what the worker has not sent yet
shards      a row for each worker, its shard of what is joined and cut again
fixed       a row for each worker, of no use to another number of them: shards of shards, `OfShards`
warm        what an exchange has learned
own warm    the same, with a row for each worker
shard warm  the same, of shards
cut         how shards were cut
seen        what `record_gradients` kept, of no use to another number of workers
"""

LEARNED: tuple[Kind, ...] = ("warm", "own warm", "shard warm", "cut", "seen")
"""What may start anew without a word."""

ROWLESS: tuple[Kind, ...] = ("shared", "warm")
"""What has no rows."""


class Leaf(NamedTuple):
    """A leaf of a state."""

    kind: Kind  # what it is
    shape: tuple[int, ...]  # its shape, with all rows
    dtype: str  # its dtype, as text
    # gets its values to a sharding, or to the host if that is None; of keys, their data
    read: Callable[[jax.sharding.Sharding | None], Array | jax.Array]
    size: int = 0  # of shards, of how many values they are
    pieces: int = 0  # of shards, how many there are of each part

    def on_host(self) -> Array:
        """Its values on the host."""
        return np.asarray(self.read(None))

    @property
    def is_key(self) -> bool:
        """Whether it holds typed PRNG keys."""
        return self.dtype.startswith("key<")


TOLD = ("kind", "dtype", "size", "pieces")
"""What a checkpoint says of a leaf as it is."""


def describe(tree: PyTree, owner: str) -> dict[str, Leaf]:
    """The leaves of a tree in their order, by their paths."""
    out: dict[str, Leaf] = {}
    for path, leaf, kind, size, pieces in _walk((), tree, "shared"):
        name = name_of(path)
        if name in out:
            raise ValueError(
                f"{owner}(state): must have one leaf at a path, got two at {name}; rename a key."
            )
        if kind == "residual" and not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            kind = "own warm"  # a counter of a memory, which nothing was lost to
        reader = _reader(name, leaf, owner)
        out[name] = Leaf(kind, jnp.shape(leaf), _dtype(leaf), reader, size, pieces)
    return out


def name_of(path: tuple[Any, ...]) -> str:
    """A path as text: keys, positions and fields alike, so that containers may differ."""
    keys = (jax.tree_util.keystr((key,), simple=True) for key in path)
    return ".".join(quote(key, safe=" ").replace(".", "%2E") for key in keys)


def workers_of(leaves: Mapping[str, Leaf]) -> int:
    """For how many workers a state was made; 1 if none has anything of its own."""
    kinds: list[Kind] = ["own", "residual", "own warm", "shards", "seen", "fixed"]
    known = (leaf for kind in kinds for leaf in leaves.values() if leaf.kind == kind and leaf.shape)
    return next((leaf.shape[0] for leaf in known), 1)


def with_rows(leaves: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """The same, where the parameters of workers that train on their own have rows.

    Beside the state of `diloco` they are what has the path of a leaf of its anchor at the end of
    its own, and the shape of that with an axis of workers before it.
    """
    mean, workers = "pmean.0.step", workers_of(leaves)
    states = [name.removesuffix(mean) for name in leaves if f".{name}".endswith(f".{mean}")]
    shapes = [
        (state, name.removeprefix(f"{state}anchor"), (workers, *leaf.shape))
        for state in states
        for name, leaf in leaves.items()
        if f"{name}.".startswith(f"{state}anchor.")
    ]

    def is_row(name: str, leaf: Leaf) -> bool:
        return leaf.kind == "shared" and any(
            not name.startswith(state) and f".{name}".endswith(end) and leaf.shape == shape
            for state, end, shape in shapes
        )

    return {n: leaf._replace(kind="own") if is_row(n, leaf) else leaf for n, leaf in leaves.items()}


def _children(node: Any) -> list[tuple[Any, Any]]:
    """What is directly below a node, with its key."""
    pairs = jax.tree.leaves_with_path(node, is_leaf=lambda other: other is not node)
    return [(path[0], child) for path, child in pairs if path]


def _text(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)


Found = tuple[tuple[Any, ...], Any, Kind, int, int]


def _walk(path: tuple[Any, ...], node: Any, kind: Kind) -> Iterator[Found]:
    if kind == "shared" and is_state(node, CompressedPmeanState):
        for key, value in _children(node):
            yield from _walk((*path, key), value, _FIELDS.get(_text(key), "shared"))
    elif kind == "shared" and isinstance(node, OfShards):
        yield from _each(path, node, "fixed")
    elif kind == "shared" and isinstance(node, PerWorker):
        yield from _each(path, node, "own")
    elif kind == "shared" and {"step", "taken", "gradients"} == set(getattr(node, "_fields", ())):
        for key, value in _children(node):
            found: Kind = "shared" if _text(key) == "step" else "seen"
            yield from _each((*path, key), value, found)
    elif kind in ("warm", "own warm", "shard warm") and isinstance(node, Shards):
        yield from _shards(path, node, nested=kind == "shard warm")
    elif kind in ("own warm", "shard warm") and isinstance(node, PerShard):
        yield from _each(path, node, "shard warm")
    elif kind == "warm" and is_rows(node):
        for key, value in _children(node):
            yield from _walk((*path, key), value, "own warm")
    elif jax.tree_util.all_leaves([node]):
        yield path, node, kind, 0, 0
    else:
        for key, value in _children(node):
            yield from _walk((*path, key), value, kind)


_FIELDS: dict[str, Kind] = {"memory": "residual", "exchange": "warm"}


def _shards(path: tuple[Any, ...], node: Shards, nested: bool) -> Iterator[Found]:
    sizes, number = map(_values, (node.sizes, node.number))
    pieces = 0 if number is None else int(number.flat[0])
    for key, value in _children(node):
        field, here = _text(key), (*path, key)
        if field == "learned":
            yield from _walk(here, value, "shard warm")
        elif field == "memory":
            # Each field of a memory's state has a leaf for each part, in their order.
            if nested:
                yield from _each(here, value, "fixed")
                continue
            for place, (inner, leaf, *_) in enumerate(_each(here, value, "shards")):
                size = 0 if sizes is None else int(sizes.flat[place % sizes.shape[-1]])
                yield inner, leaf, "shards", size, pieces
        else:
            yield from _each(here, value, "shard warm" if nested else "cut", pieces)


def _each(path: tuple[Any, ...], node: Any, kind: Kind, pieces: int = 0) -> Iterator[Found]:
    for inner, leaf in jax.tree.leaves_with_path(node):
        yield (*path, *inner), leaf, kind, 0, pieces


def _values(leaf: Any) -> Array | None:
    """What is here of an array whose rows are equal, if it has values."""
    if isinstance(leaf, jax.Array):
        leaf = leaf.addressable_shards[0].data
    return np.asarray(leaf) if isinstance(leaf, np.ndarray | jax.Array) else None


def _reader(name: str, leaf: Any, owner: str) -> Callable[[Any], Array | jax.Array]:
    def read(sharding: jax.sharding.Sharding | None) -> Array | jax.Array:
        if sharding is not None and isinstance(leaf, jax.Array):
            return jax.device_put(leaf, sharding)
        here = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
        if not (here or leaf.is_fully_replicated):
            raise ValueError(
                f"{owner}(state): must be on devices of this process, got {name} on those of "
                "several; save it with fftgrad.checkpoint.save and restore it."
            )
        return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)

    return read


def _dtype(leaf: Any) -> str:
    if _is_key(leaf):
        return f"key<{jax.random.key_impl(leaf)}>"
    return str(jnp.result_type(leaf))


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
