"""Parameters of an island on the host, and the programs that all islands run.

Each island runs these programs on one CPU device. On accelerators or meshes that differ, sums would
have different orders, and thus different rounding errors.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

from fftgrad._contracts import Codec, Like, Memory, Payload, PyTree, Step
from fftgrad._values import brief, check
from fftgrad.exchanges import AllGather, _bucketing, _parts
from fftgrad.exchanges._all_gather import clipped_mean
from fftgrad.exchanges._bucketing import Bucketing
from fftgrad.exchanges._parts import Parts, Payloads
from fftgrad.islands._objects import DamagedError
from fftgrad.ops._shapes import by_path
from fftgrad.tools import _bytes

Array: TypeAlias = np.ndarray[Any, Any]
Tree: TypeAlias = dict[str, Array]
"""Float32 leaves by path. The containers of the parameters do not matter."""


@dataclasses.dataclass(frozen=True)
class Model:
    """Paths, shapes and dtypes of the parameters of a program."""

    structure: Any
    leaves: tuple[tuple[str, tuple[int, ...], str], ...]  # path, shape and dtype of each leaf

    @classmethod
    def of(cls, params: PyTree) -> "Model":
        _bucketing.check_tree("Island", "params", params)
        return cls(jax.tree.structure(params), _leaves_of(params))

    @property
    def described(self) -> list[list[Any]]:
        """Paths, shapes and dtypes of the leaves for JSON, sorted by path."""
        return sorted([path, list(shape), dtype] for path, shape, dtype in self.leaves)

    @property
    def digest(self) -> str:
        """Digest of paths, shapes and dtypes."""
        text = json.dumps(self.described, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def likes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the float32 leaves of a `Tree`."""
        return {p: jax.ShapeDtypeStruct(shape, jnp.float32) for p, shape, _ in sorted(self.leaves)}

    def check(self, params: PyTree) -> None:
        """Refuse parameters with other paths, shapes or dtypes than the model."""
        found = _leaves_of(params)
        odd = [leaf for leaf in found if leaf not in self.leaves] or [*found]
        rule, remedy = "have the leaves of Island(params)", "pass the parameters of the island."
        check(found == self.leaves, "Island.step(params)", rule, brief(odd), remedy)

    def to_host(self, params: PyTree) -> Tree:
        """Copy the parameters to the host, so that the program may donate or move them."""
        return {path: _to_host(leaf) for path, leaf in sorted(by_path(params).items())}

    def as_held(self, tree: Tree) -> Tree:
        """Round the float32 leaves to the dtypes of the program's parameters."""
        return {p: tree[p].astype(dtype).astype(np.float32) for p, _, dtype in sorted(self.leaves)}

    def to_params(self, tree: Tree, like: PyTree) -> PyTree:
        """Convert a `Tree` to parameters with the shardings and dtypes of `like`."""
        pairs = zip(self.leaves, jax.tree.leaves(like), strict=True)
        leaves = [_to_devices(tree[path], leaf) for (path, *_), leaf in pairs]
        return jax.tree.unflatten(self.structure, leaves)


def _leaves_of(params: PyTree) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    leaves = by_path(params).items()
    return tuple((path, np.shape(leaf), str(leaf.dtype)) for path, leaf in leaves)


def _to_host(leaf: Any) -> Any:
    """Copy a whole array to the host of each process, as float32."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.array(leaf, np.float32)


def _to_devices(value: np.ndarray[Any, Any], like: Any) -> Any:
    """Copy a host array to devices, with the sharding and dtype of `like`."""
    value = value.astype(like.dtype)
    if not isinstance(like, jax.Array):
        return jax.device_put(value)
    return jax.make_array_from_callback(value.shape, like.sharding, lambda index: value[index])


def check_finite(tree: Tree) -> None:
    bad = [path for path, leaf in tree.items() if not np.isfinite(leaf).all()]
    check(not bad, "Island(params)", "be finite", bad, "pass the initial ones.")


def blended(own: Tree, common: Tree, share: float) -> Tree:
    """Return share · own + (1 - share) · common. A leaf that is not finite in `own` has share 0."""
    kept = np.float32(share)
    return {
        path: kept * own[path] + (1 - kept) * leaf if np.isfinite(own[path]).all() else leaf
        for path, leaf in common.items()
    }


Outer = Callable[[float], optax.GradientTransformation]
"""Function from a learning rate to an optimizer. The state has the same shapes for all rates."""


def on_host() -> AbstractContextManager[Any]:
    """Make the first CPU device the default. If JAX raises an error, JAX_PLATFORMS lacks cpu."""
    return jax.default_device(jax.local_devices(backend="cpu")[0])


@dataclasses.dataclass(frozen=True)
class Programs:
    """Programs of a run, which compress, decode and average changes."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]  # path and shape of each leaf, by path
    exchange: AllGather  # the codec, and whether the mean is clipped
    outer: Outer = optax.sgd
    rate: float = 1.0  # learning rate of `outer`

    @classmethod
    def of(cls, model: Model, *args: Any) -> "Programs":
        """Make the programs for a model. `args` are the fields exchange, outer and rate."""
        return cls(tuple((path, like.shape) for path, like in model.likes.items()), *args)

    @functools.cached_property
    def like(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in self.shapes}

    @property
    def _bucketing(self) -> Bucketing:
        return Bucketing().for_exchange(self.exchange)

    @functools.cached_property
    def _buckets(self) -> list[Parts]:
        """For each bucket, the codecs of its parts."""
        buckets = _bucketing.bucket_likes(self.like, self._bucketing)
        return [_parts.codec_of(self.exchange.codec, bucket) for bucket in buckets]

    @functools.cached_property
    def _of_parts(self) -> list[tuple[Codec, Like]]:
        """Codec and shape of each part, in payload order."""
        return [pair for codec in self._buckets for pair in codec.pairs]

    def init(self) -> Any:
        with on_host():
            return [codec.init() for codec in self._buckets]

    def compress(
        self, memory: Memory, change: Tree, kept: Any, states: Any, number: int, own: int
    ) -> tuple[list[Payloads], Tree, Any, Any]:
        """Compress a change; return payloads, the decoded change, and memory and codec states."""
        with on_host():
            return jax.device_get(
                _compress(self, memory, change, kept, states, np.int32(number), np.uint32(own))
            )

    def decode(self, payloads: list[Payloads], number: int) -> list[Array]:
        """Decode the payloads of one contribution into a vector for each part."""
        with on_host():
            return jax.device_get(_decode(self, payloads, np.int32(number)))

    def advance(
        self,
        state: tuple[Tree, PyTree],
        sent: Sequence[list[Payloads]],
        shares: Sequence[float],
        number: int,
    ) -> tuple[Tree, PyTree]:
        """Return the parameters and the outer state after a round. This function is pure.

        The sum adds the contributions in the order of `sent`. Copies with weight 0 pad their number
        to a power of two, so that few programs are compiled.
        """
        size = 1 << (len(sent) - 1).bit_length()
        filled = [*sent, *[sent[0]] * (size - len(sent))]
        stacked = jax.tree.map(lambda *rows: np.stack(rows), *filled)
        weights = np.zeros((size,), np.float32)
        weights[: len(shares)] = shares
        with on_host():
            return jax.device_get(_advance(self, state, stacked, weights, np.int32(number)))

    def try_out(self, memory: Memory, state: tuple[Tree, PyTree], islands: int) -> None:
        """Compile all programs in advance, because a round has a deadline.

        If the codec does not fit the parameters, this call raises the error.
        """
        with on_host():
            kept = memory.init(self.like)
        nothing = {path: np.zeros(shape, np.float32) for path, shape in self.shapes}
        payloads, *_ = self.compress(memory, nothing, kept, self.init(), 0, 0)
        payloads = self.from_bytes(self.to_bytes(payloads))
        self.decode(payloads, 0)
        for size in (1 << bits for bits in range((islands - 1).bit_length() + 1)):
            self.advance(state, [payloads] * size, [1.0 / size] * size, 0)

    def to_bytes(self, payloads: list[Payloads]) -> list[bytes]:
        """Convert each payload to bytes by `fg.tools.to_bytes`."""
        flat = [payload for bucket in payloads for payload in bucket]
        with on_host():
            pairs = zip(flat, self._of_parts, strict=True)
            return [_bytes.to_bytes(payload, codec, like) for payload, (codec, like) in pairs]

    def from_bytes(self, blobs: Sequence[bytes | memoryview]) -> list[Payloads]:
        """Parse payloads; raise `DamagedError` if they are of other codecs or shapes."""
        if len(blobs) != len(self._of_parts):
            raise DamagedError(f"of {len(blobs)} parts in place of {len(self._of_parts)}")
        with on_host():
            try:
                pairs = zip(blobs, self._of_parts, strict=True)
                found = [_bytes.from_bytes(blob, codec, like) for blob, (codec, like) in pairs]
            except ValueError as error:
                raise DamagedError(str(error)) from None
        flat: Iterator[Payload] = iter(jax.device_get(found))
        return [tuple(next(flat) for _ in codec.pairs) for codec in self._buckets]


def _step(number: Any, own: Any = 0) -> Step:
    """Return the `Step` of a round, with a shared random key and an island's local key."""
    return Step.of(jax.random.fold_in(jax.random.key(0), number), number).fold_local(own)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compress(
    programs: Programs, memory: Memory, change: Any, kept: Any, states: Any, number: Any, own: Any
) -> Any:
    x, kept = memory.add(change, kept)
    buckets, join = _bucketing.to_buckets(x, programs._bucketing)
    payloads: list[Payloads] = []
    sent: list[Any] = []
    after: list[Any] = []
    every = zip(buckets, states, programs._buckets, strict=True)
    for i, (bucket, state, codec) in enumerate(every):
        step = _step(number, own).fold(i)
        out = codec.compress(_parts.vectors(bucket), state, step)
        payloads.append(codec.apart(out.payloads))
        sent.append(_parts.rebuild(codec.decompress(out.payloads, step), bucket))
        after.append(out.state)
    joined = join(sent)
    error = jax.tree.map(jnp.subtract, x, joined)
    return payloads, joined, memory.update(x, error, joined, kept), after


@functools.partial(jax.jit, static_argnums=0)
def _decode(programs: Programs, payloads: Any, number: Any) -> Any:
    every = zip(programs._buckets, payloads, strict=True)
    return [
        vector
        for i, (codec, own) in enumerate(every)
        for vector in codec.decompress(codec.join(own), _step(number).fold(i))
    ]


@functools.partial(jax.jit, static_argnums=0)
def _advance(programs: Programs, state: Any, sent: Any, shares: Any, number: Any) -> Any:
    anchor, before = state
    buckets, join = _bucketing.to_buckets(anchor, programs._bucketing)
    means: list[Any] = []
    every = zip(buckets, sent, programs._buckets, strict=True)
    for i, (bucket, payloads, codec) in enumerate(every):
        stacked = codec.join(payloads, axis=1)
        vectors = _mean(programs.exchange, codec, stacked, shares, _step(number).fold(i))
        means.append(_parts.rebuild(vectors, bucket))
    updates, after = programs.outer(programs.rate).update(join(means), before, anchor)
    return optax.apply_updates(anchor, updates), after


def _mean(exchange: AllGather, codec: Parts, payloads: Any, shares: jax.Array, step: Step) -> Any:
    """Average the decoded payloads with weights `shares`; clip them if the exchange says so."""
    if exchange.clip_to_median:
        return clipped_mean(codec, payloads, shares, step)
    return codec.mean(payloads, jnp.zeros((), jnp.float32), step, shares)
