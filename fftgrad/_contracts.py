"""The contracts of codecs, memories and exchanges. Read this file first.

    Codec      converts between a vector and its payload; a stage, or a chain of stages.
    Memory     keeps the values that a worker could not send.
    Exchange   compresses, runs the collective, decodes and averages.

Rules for all of them: configuration is a frozen dataclass, whose `repr` is the call that makes it.
State is a pytree of arrays that the caller holds. Shapes are static; bytes follow from them. A
claim (`summable`, `unbiased`) is False until a test shows it. If x has a non-finite value, so has
decompress(compress(x)): add `fg.codecs.poison(x)` to a scale, as XLA's maximum may drop a NaN.
"""

import abc
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from fftgrad._axes import AxisName as AxisName
from fftgrad._comm import Comm as Comm
from fftgrad._comm import Stats as Stats
from fftgrad._comm import Step as Step
from fftgrad.ops import _collectives
from fftgrad.ops._positions import Sparse as Sparse
from fftgrad.ops._shapes import Like as Like
from fftgrad.ops._shapes import PyTree as PyTree

Scope: TypeAlias = Literal["model", "leaf"] | Callable[[str, Like], str]
"""Rule that groups leaves into parts: one part, a part per leaf, or a part per returned name."""


class Payload(NamedTuple):
    """Result of compressing a vector."""

    main: Any  # for the next stage of a chain, or sent
    side: PyTree = ()  # sent unchanged: packed indices, scales


class Compressed(NamedTuple):
    """Result of `Codec.compress`."""

    payload: Payload
    overflow: jax.Array | int = 0  # number of saturated values, int32; 0, an int, if impossible
    state: PyTree = ()  # the codec's next state
    sparse: Sparse | None = None  # the decoded payload, if `compress` knows it


class Codec(abc.ABC):
    """A pair of pure functions on vectors of static shape, and claims about them."""

    @property
    def summable(self) -> bool:
        """Claim: decompressing a sum of payloads gives the sum of the decompressed payloads."""
        return False

    @property
    def unbiased(self) -> bool:
        """Claim: E[decompress(compress(x))] == x, over the random keys of the step."""
        return False

    @property
    def last(self) -> bool:
        """True if no stage can follow in a chain, because `main` holds codes, not values."""
        return False

    def init(self, like: Like) -> PyTree:
        """Make the first state for a vector like `like`; () if the codec has no state."""
        return ()

    @abc.abstractmethod
    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        """Make the payload of the vector `x`, and the next state."""

    @abc.abstractmethod
    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        """Decode a payload to a vector like `like`, without a state of the sender."""

    def shard(self, parts: int) -> "Codec":
        """Return the codec for one of `parts` equal shards; a selector keeps k/parts values."""
        return self


class Transform(Codec):
    """Codec: a linear, invertible change of basis."""

    @property
    def summable(self) -> bool:
        return True

    @property
    def unbiased(self) -> bool:
        return True

    def reach(self, n: int) -> int:
        """Return the number of values that depend on one coefficient: the length of a block."""
        return n

    def at_blocks(self, coefficients: Sparse, like: Like, step: Step) -> Sparse:
        """Invert the transform of a vector with few non-zero coefficients, if `reach` is small."""
        raise NotImplementedError


class Selector(Codec):
    """Codec: keeps some coefficients in `main`, and their positions in `side`."""

    @abc.abstractmethod
    def positions(self, side: PyTree, n: int, step: Step) -> jax.Array:
        """Return positions int32[k], ascending and distinct; those of unused slots are >= n."""

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        found = Sparse(self.positions(payload.side, like.shape[0], step), payload.main)
        return found.put_into(jnp.zeros(like.shape, payload.main.dtype))

    def sparse(self, payload: Payload, like: Like, step: Step) -> Sparse | None:
        """Return the result of `decompress` without its zeros; None if it is not sparse."""
        if type(self).decompress is not Selector.decompress:
            return None  # a custom decompress may return other values
        return Sparse(self.positions(payload.side, like.shape[0], step), payload.main)


class Quantizer(Codec):
    """Codec: encodes each value in a few bits. Its `main` holds codes, so it comes last."""

    @property
    def last(self) -> bool:
        return True


class Memory(abc.ABC):
    """State of a worker between steps, leaf by leaf, on float32 pytrees."""

    def init(self, like: PyTree) -> PyTree:
        """Make the first state for gradients shaped like `like`."""
        return ()

    def add(self, grad: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """Return the tree `x` to exchange in place of `grad`, and the state for `update`."""
        return grad, state

    @abc.abstractmethod
    def update(self, x: PyTree, error: PyTree, mean: PyTree, state: PyTree) -> PyTree:
        """Return the next state; `error` is the part of `x` that the others did not receive."""

    def restore(self, lost: PyTree, state: PyTree) -> PyTree:
        """Add `lost`, what narrow leaves cannot hold of the float32 mean, to the values to send."""
        return state


class State(NamedTuple):
    """State of an exchange between steps, by owner."""

    shared: PyTree = ()  # equal on all workers
    own: PyTree = ()  # of this worker


class Averaged(NamedTuple):
    """Result of an exchange; `mean` and `error` are shaped like `x`."""

    mean: PyTree  # the same bits on all workers; not finite if any input was not finite
    error: PyTree | None  # part of x that the others did not receive; None if the exchange keeps it
    state: State = State()  # after a bad step the caller keeps the old state
    stats: Stats = Stats()  # from the headers

    def error_or_zeros(self, x: PyTree) -> PyTree:
        """Return the error for the memory of `x`; zeros if the exchange keeps it."""
        return jax.tree.map(jnp.zeros_like, x) if self.error is None else self.error


class Exchange(abc.ABC):
    """A mean over the workers of an array float32[...], or of the parts of a gradient, a tuple.

    Each part is compressed on its own. All parts travel together. All workers get the same bits. If
    any value of any worker is not finite, the mean is not finite.
    """

    @property
    def scope(self) -> Scope | None:
        """Parts that the exchange needs; None if any parts work."""
        return "model"

    def init(self, like: PyTree) -> State:
        """Make the first state for arrays like `like`."""
        return State()

    @abc.abstractmethod
    def mean(self, x: PyTree, state: State, comm: Comm) -> Averaged:
        """Average `x` over the workers by the collectives of `comm`."""

    def wire_bytes(self, like: PyTree) -> int:
        """Return the bytes that each worker passes to the collectives, as if it were alone."""
        return sum(found.bytes for found in self._collectives(like, 1))

    def link_bytes(self, like: PyTree, workers: int) -> float:
        """Return the bytes that each of `workers` workers in a ring sends over its link."""
        return float(sum(c.link_bytes(workers) for c in self._collectives(like, workers)))

    def _collectives(self, like: PyTree, workers: int) -> tuple[_collectives.Collective, ...]:
        mean = lambda x: self.mean(x, self.init(x), Comm("worker", Step.of(0))).mean  # noqa: E731
        return _collectives.unconditional(mean, {"worker": workers}, like)
