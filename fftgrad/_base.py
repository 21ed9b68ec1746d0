"""The four contracts, and the values that pass between their implementations."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp

PyTree: TypeAlias = Any
"""A nest of containers with arrays (or shapes) at its leaves."""

AxisName: TypeAlias = str | tuple[str, ...]
"""One mesh axis, or several that act as one."""

Like: TypeAlias = jax.Array | jax.ShapeDtypeStruct
"""Anything that has a shape and a dtype."""


class Payload(NamedTuple):
    """What a codec makes of an array.

    Attributes:
      main: handed to the next stage of a chain, or sent.
      side: sent as it is: packed indices, scales.
      overflow: how many values the codec could not represent, int32; they saturated or stayed
        behind. It travels in the header of the wire buffer.
    """

    main: jax.Array
    side: PyTree = ()
    overflow: jax.Array | int = 0


class Rng(NamedTuple):
    """The randomness of one step.

    Attributes:
      shared: a key equal on all workers: random supports, random signs. Decompressing may use it.
      local: a key that differs between workers: dither. Decompressing must not use it, because
        the receiver has another one.
    """

    shared: jax.Array
    local: jax.Array

    @classmethod
    def of(cls, key: jax.Array | int) -> "Rng":
        """The randomness of a worker that is on its own."""
        shared, local = jax.random.split(as_key(key))
        return cls(shared, local)


def as_key(key: jax.Array | int) -> jax.Array:
    """A typed PRNG key from a seed, a raw key or a typed key."""
    if isinstance(key, int):
        return jax.random.key(key)
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    return jax.random.wrap_key_data(key)


@runtime_checkable
class Codec(Protocol):
    """A stage, or a chain of stages: a pair of pure functions on arrays of static shape.

    A claim is True only where it is proved and tested.
    """

    @property
    def summable(self) -> bool:
        """decompress(sum of payloads) == sum of decompress(payload)."""
        ...

    @property
    def unbiased(self) -> bool:
        """E[decompress(compress(x))] == x, over the randomness of the step."""
        ...

    def compress(self, x: jax.Array, rng: Rng | None) -> Payload:
        """What to send for the vector `x`."""
        ...

    def decompress(self, payload: Payload, like: Like, rng: Rng | None) -> jax.Array:
        """The vector that a payload stands for, with the shape and dtype of `like`."""
        ...


@runtime_checkable
class SparseCodec(Codec, Protocol):
    """A codec whose payload stands for a few values, and can be added where they belong."""

    def accumulate(self, total: jax.Array, payload: Payload) -> jax.Array:
        """`total` + what the payload stands for, touching no other value."""
        ...


@runtime_checkable
class SupportCodec(SparseCodec, Protocol):
    """A sparse codec whose side says where its values belong, so that others may use the same."""

    def at(self, x: jax.Array, side: PyTree) -> jax.Array:
        """The values of `x` where `side` says."""
        ...

    def positions(self, side: PyTree, n: int) -> jax.Array:
        """Where in n values that is, int32[k]: ascending, all different, from n on for nowhere."""
        ...


@runtime_checkable
class BlockCodec(Codec, Protocol):
    """A linear transform of blocks, which a few coefficients can be undone of without the rest."""

    def reach(self, n: int) -> int:
        """How many of n values depend on one coefficient: the length of a block."""
        ...

    def accumulate_at(
        self, total: jax.Array, positions: jax.Array, coefficients: jax.Array
    ) -> jax.Array:
        """`total` + what these coefficients stand for, where the others are zero.

        The positions ascend, and differ; the result does not depend on the order of additions.
        """
        ...


@runtime_checkable
class AdaptiveCodec(Codec, Protocol):
    """A codec that remembers something of earlier steps, on each worker: a threshold, a parity.

    `compress` is what it does before the first step. Decompressing needs no state.
    """

    def init(self, like: Like) -> PyTree:
        """The state before the first step, for a vector like `like`."""
        ...

    def adapt(self, x: jax.Array, state: PyTree, rng: Rng | None) -> tuple[Payload, PyTree]:
        """What to send for the vector `x`, and the next state."""
        ...


@runtime_checkable
class BudgetCodec(Codec, Protocol):
    """A codec that keeps a number of coefficients, however long the vector is."""

    def shard(self, parts: int) -> Codec:
        """The codec for one of `parts` equal shards of a vector, within the same number."""
        ...


CodecRule: TypeAlias = Callable[[str, Like], Codec]
"""The codec of each part of a gradient, by its name and shape."""


class Memory(Protocol):
    """What a worker remembers between steps. Works leaf by leaf on float32 pytrees."""

    def init(self, like: PyTree) -> PyTree:
        """The state before the first step, for gradients shaped like `like`."""
        ...

    def compensate(self, grad: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """The tree `x` to exchange instead of `grad`, and the state to keep meanwhile."""
        ...

    def update(self, x: PyTree, sent: PyTree, mean: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """The mean to apply and the next state, once the others have received `sent`."""
        ...


class Reduced(NamedTuple):
    """What an exchange returns.

    Attributes:
      mean: the average over the workers of what they sent, the same bits on all of them.
      sent: what the others received of this worker's `x`.
      state: the exchange's next state.

    `mean` and `sent` are shaped like `x`.
    """

    mean: PyTree
    sent: PyTree
    state: PyTree


@runtime_checkable
class Exchange(Protocol):
    """A mean over a named axis. The only part that knows an axis name.

    What it averages is an array, or a dict of named ones: the parts of a gradient, each of which
    is compressed on its own, while all travel together.
    """

    def init(self, like: PyTree) -> PyTree:
        """The state before the first step, for arrays like `like`."""
        ...

    def mean(self, x: PyTree, state: PyTree, rng: Rng, axis_name: AxisName) -> Reduced:
        """The mean of `x` over the axis."""
        ...

    def wire_bytes(self, like: PyTree) -> int:
        """Bytes that one worker hands to the collectives for arrays like `like`."""
        ...


@runtime_checkable
class WatchfulExchange(Exchange, Protocol):
    """An exchange that the loss tells something."""

    def observe(self, state: PyTree, loss: jax.Array) -> PyTree:
        """The state, once the mean loss of all workers is known."""
        ...


def constructor_call(self: Any) -> str:
    """The `repr` of a configuration: the call that makes it, without what it leaves at default."""
    given = (
        f"{field.name}={getattr(self, field.name)!r}"
        for field in dataclasses.fields(self)
        if getattr(self, field.name) != field.default
    )
    return f"{type(self).__name__}({', '.join(given)})"


def spec(tree: PyTree) -> PyTree:
    """The shapes and dtypes of a tree."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def payload_spec(codec: Codec, like: Like) -> Payload:
    """The shapes and dtypes of a payload, found without any data."""
    return _payload_spec(codec, like.shape, like.dtype)


# Each spec traces the codec, and one step asks for the same ones many times.
@functools.lru_cache(maxsize=4096)
def _payload_spec(codec: Codec, shape: tuple[int, ...], dtype: Any) -> Payload:
    like = jax.ShapeDtypeStruct(shape, dtype)
    # Shapes and dtypes only: what else JAX notes there belongs to where it was asked first.
    return spec(jax.eval_shape(lambda x: codec.compress(x, Rng.of(0)), like))
