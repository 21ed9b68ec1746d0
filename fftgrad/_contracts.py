"""The contracts: what a codec, a memory and an exchange are. The page to read first.

    Codec      one vector <-> what is sent for it. A stage, or a chain of stages.
    Memory     what a worker keeps of what it could not send.
    Exchange   the collective: compress, send, decode, average.

Rules for all of them: configuration is a frozen dataclass, whose `repr` is the call that makes it.
What changes from step to step is a pytree of arrays that the caller holds. Shapes are static, and
bytes follow from shapes alone. A claim (`summable`, `unbiased`) is False until it is proved and
tested. A value that is not finite is never hidden: decompress(compress(x)) has one then. XLA's
maximum may drop NaN, so add `fg.codecs.poison(x)` to whatever stands for all values.
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
"""Which leaves form a part: all, each, or those to which a function gives the same name."""


class Payload(NamedTuple):
    """What is sent for a vector."""

    main: Any  # handed to the next stage of a chain, or sent
    side: PyTree = ()  # sent as it is: packed indices, scales


class Compressed(NamedTuple):
    """What `Codec.compress` returns."""

    payload: Payload
    overflow: jax.Array | int = 0  # how many values saturated, int32; the number 0: none ever
    state: PyTree = ()  # the codec's next state


class Codec(abc.ABC):
    """A pair of pure functions on vectors of static shape, and what is claimed of them."""

    @property
    def summable(self) -> bool:
        """Claim: decompress(sum of payloads) == sum of decompress(payload)."""
        return False

    @property
    def unbiased(self) -> bool:
        """Claim: E[decompress(compress(x))] == x, over the randomness of the step."""
        return False

    @property
    def last(self) -> bool:
        """Whether nothing can follow in a chain, because `main` holds codes, not values."""
        return False

    def init(self, like: Like) -> PyTree:
        """The state before the first step, for a vector like `like`; () for none."""
        return ()

    @abc.abstractmethod
    def compress(self, x: jax.Array, state: PyTree, step: Step) -> Compressed:
        """What to send for the vector `x`, and the next state."""

    @abc.abstractmethod
    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        """What a payload stands for, like `like`. The receiver has another state: it sees none."""

    def shard(self, parts: int) -> "Codec":
        """The codec for one of `parts` equal shards of a vector, within the same budget."""
        return self


class Transform(Codec):
    """Codec: a change of basis, linear and invertible."""

    @property
    def summable(self) -> bool:
        return True

    @property
    def unbiased(self) -> bool:
        return True

    def reach(self, n: int) -> int:
        """How many of n values depend on one coefficient: the length of a block."""
        return n

    def at_blocks(self, coefficients: Sparse, like: Like, step: Step) -> Sparse:
        """What a few coefficients stand for, if `reach` is short; the others are zero."""
        raise NotImplementedError


class Selector(Codec):
    """Codec: keeps some coefficients, in `main`, and knows where they belong."""

    @abc.abstractmethod
    def positions(self, side: PyTree, n: int, step: Step) -> jax.Array:
        """Where its values belong, int32[k]: they ascend and differ; one from n on is nowhere."""

    def decompress(self, payload: Payload, like: Like, step: Step) -> jax.Array:
        found = Sparse(self.positions(payload.side, like.shape[0], step), payload.main)
        return found.put_into(jnp.zeros(like.shape, payload.main.dtype))

    def sparse(self, payload: Payload, like: Like, step: Step) -> Sparse | None:
        """What `decompress` returns, but for the zeros; None if there are none."""
        if type(self).decompress is not Selector.decompress:
            return None  # nobody said what belongs to a decompress of one's own
        return Sparse(self.positions(payload.side, like.shape[0], step), payload.main)


class Quantizer(Codec):
    """Codec: a few bits for each value. Its `main` holds codes, so it comes last."""

    @property
    def last(self) -> bool:
        return True


class Memory(abc.ABC):
    """What a worker remembers between steps. Works leaf by leaf on float32 pytrees."""

    def init(self, like: PyTree) -> PyTree:
        """The state before the first step, for gradients shaped like `like`."""
        return ()

    def add(self, grad: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """The tree `x` to exchange instead of `grad`, and the state to keep meanwhile."""
        return grad, state

    @abc.abstractmethod
    def update(self, x: PyTree, error: PyTree, mean: PyTree, state: PyTree) -> PyTree:
        """The next state, once the others lack `error` of `x`, and the average was `mean`."""

    def restore(self, lost: PyTree, state: PyTree) -> PyTree:
        """The state, with `lost` to be sent after all: rounding drops it from the mean of all."""
        return state


class State(NamedTuple):
    """What an exchange keeps between steps, by whose it is."""

    shared: PyTree = ()  # equal on all workers
    own: PyTree = ()  # this worker's alone
    shards: PyTree = ()  # this worker's, as the owner of a shard of what all have


class Averaged(NamedTuple):
    """What an exchange returns; `mean` and `error` are shaped like `x`."""

    mean: PyTree  # of what all sent, the same bits on all; not finite if anything was not
    # what the others did not receive of this worker's x; None: the exchange keeps that itself
    error: PyTree | None
    # the caller keeps the old one after a step that is not finite: a bad step leaves no trace
    state: State = State()
    stats: Stats = Stats()  # what the workers learned of each other on the way

    def error_or_zeros(self, x: PyTree) -> PyTree:
        """What is left for a memory of `x` to keep."""
        return jax.tree.map(jnp.zeros_like, x) if self.error is None else self.error


class Exchange(abc.ABC):
    """A mean over the workers of an array, or of the parts of a gradient, a tuple.

    Each part is compressed on its own, and all travel together.
    """

    @property
    def scope(self) -> Scope | None:
        """The parts that it is made for; None if it is all the same."""
        return "model"

    def init(self, like: PyTree) -> State:
        """The state before the first step, for arrays like `like`."""
        return State()

    @abc.abstractmethod
    def mean(self, x: PyTree, state: State, comm: Comm) -> Averaged:
        """The mean of `x` over the workers, by the collectives of `comm`."""

    @abc.abstractmethod
    def wire_bytes(self, like: PyTree) -> int:
        """Bytes that one worker hands to the collectives for arrays like `like`."""

    def link_bytes(self, like: PyTree, workers: int) -> float:
        """Bytes over the link of each of so many workers, in a ring, for arrays like `like`."""
        comm = Comm("worker", Step.of(0))
        mean = lambda x: self.mean(x, self.init(x), comm).mean  # noqa: E731
        return _collectives.link_bytes(mean, {"worker": workers}, like)
