"""LGC: an autoencoder in Flax, which learns to encode the largest values during training.

This module needs the extra `pip install -e ".[learned]"`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from fftgrad import _axes
from fftgrad._contracts import (
    Averaged,
    Comm,
    Exchange,
    Memory,
    Payload,
    PyTree,
    Scope,
    Selector,
    State,
    Stats,
    Step,
)
from fftgrad._values import check, check_choice, check_count, check_kind, check_within, value
from fftgrad.codecs import _chain, _sum
from fftgrad.codecs._top_k import TopK
from fftgrad.codecs._transforms import Identity
from fftgrad.contrib import _autoencoder
from fftgrad.contrib._autoencoder import Autoencoder
from fftgrad.exchanges import _parts, _schedule
from fftgrad.exchanges._all_reduce import AllReduce
from fftgrad.exchanges._parts import Codecs, DenseByName, Parts, Vectors
from fftgrad.exchanges._recipe import Recipe
from fftgrad.exchanges._schedule import Scheduled
from fftgrad.memories import ErrorFeedback
from fftgrad.ops import _finite, _shapes, _wire

__all__ = ["Autoencoder", "LearnedCodes", "LearnedCodesState", "lgc"]

Variant = Literal["leader", "all_reduce"]

CODE_DTYPE = jnp.bfloat16
"""Dtype of the leader's code in the broadcast. Codes in a sum stay in float32."""


class LearnedCodesState(NamedTuple):
    """Shared state of `LearnedCodes`. A worker's own state is the state of its selectors.

    Attributes:
      autoencoder: parameters of the autoencoder, equal on all workers from step `until` on.
      error: relative error in the last step of learning, float32[1]; 1 before the first step.
      agreed: True if the leader's parameters were broadcast after learning, bool[1].
    """

    autoencoder: PyTree
    error: jax.Array
    agreed: jax.Array


@value
class LearnedCodes(Exchange):
    """Exchange: values at a leader's positions, encoded by an autoencoder that learns in training.

    At step t, worker t mod w is the leader L and chooses the positions of its largest values, as in
    `LeaderTopK`. Before step `until`, all workers gather their exact values at these positions, and
    train the same autoencoder on them: an encoder E and a decoder D. From step `until` on, workers
    send codes. With u_i the values of worker i, divided by their root mean square, u_i becomes

        "leader":      D(E(u_L)) + b J_i,  J_i the largest of u_i - D(E(u_L)), sent by each worker,
        "all_reduce":  D(Σ_i g_i E(u_i) / Σ_i g_i), with the sum by an all-reduce,

    where b is a parameter of D. All workers multiply the result for u_i by a scale g_i >= 0, which
    minimizes the error of worker i's own code. If g_i is 0, nothing is sent. Half of the
    autoencoder's loss is the decoding error, and half is the variance of the workers' codes.

    Args:
      codec: a selector of a fixed number of values, such as `TopK`. Or a rule from a part's name
        and shape to such a selector, or to `Identity()` for dense parts.
      until: first step in which codes travel; None to learn in all steps, 0 in no step.
      variant: "leader" or "all_reduce".
      innovation: with "leader", share of the k values in J_i; at least one value.
      rate: learning rate of the autoencoder. Its gradients are clipped to norm 1.
      autoencoder: layers of the autoencoder.

    Wire: the leader's positions once, and 4 bytes for each value of the dense parts. In addition,
      a learning step gathers 4 + 4k bytes, with k values at the positions. A coding step with
      "leader" broadcasts the code, by default k / 4 numbers of 2 bytes. It also gathers 12 bytes,
      and 4 bytes and a position for each value of J_i. With "all_reduce", a coding step sends 8
      bytes, and 4 bytes for each number of the code. Step `until` also broadcasts the parameters of
      the autoencoder, 4 bytes each. `.at(step).wire_bytes(x)` computes the bytes.

    Claims: all workers get the same bits. The mean equals the mean of the sent values up to
      rounding, so error feedback keeps all unsent values. With "leader", ||x - sent||² <= ||x||²
      for any parameters of the autoencoder. With "all_reduce", this may not hold. There, worker
      i's sent values are g_i (D(c) + D'(c) (E(u_i) - c)), with c the mean code and D' the
      derivative, because a nonlinear decoder has no exact share for each worker. If a value of any
      worker is not finite, the whole mean is NaN.

    Differs from the paper: this follows the abstract and a public implementation, because the full
      text was not available. One code contains the values of all parts, padded with zeros to whole
      strides, instead of one code for each layer. fftgrad adds the scales g_i, the division by the
      root mean square, clipped gradients and a leader's code in bfloat16. An innovation J_i is the
      error of the code instead of the largest values. The autoencoder learns to decode the same
      code as in later steps: the leader's code or the mean code.

    Raises:
      ValueError: while tracing, for another codec. Also if `wire_bytes` changes with the step.

    Example:
      >>> from fftgrad.contrib import learned
      >>> exchange = learned.LearnedCodes(fg.TopK(fraction=0.01), until=500)
      >>> [fg.wire_bytes(exchange.at(step), jnp.ones(100_000)) for step in (0, 500)]
      [5080, 1600]

    References:
      Abrahamyan et al., TNNLS 2021, arXiv:2103.08870.
    """

    codec: Codecs
    until: int | None
    variant: Variant = "leader"
    innovation: float = 1e-5
    rate: float = 1e-3
    autoencoder: Autoencoder = Autoencoder()

    def __post_init__(self) -> None:
        _parts.check_codec("LearnedCodes", self.codec)
        if self.until is not None:
            check_count("LearnedCodes(until)", self.until, "use None to always learn.", least=0)
        check_within("LearnedCodes(innovation)", self.innovation, "(0, 1]", "use 1e-5.")
        check_within("LearnedCodes(rate)", self.rate, "(0, inf)", "use 1e-3.")
        check_choice("LearnedCodes(variant)", self.variant, get_args(Variant))
        check_kind("LearnedCodes(autoencoder)", self.autoencoder, Autoencoder, "use Autoencoder().")

    @property
    def scope(self) -> Scope:
        return _parts.scope_of(self.codec)

    def at(self, step: int) -> "LearnedCodes":
        """Return the exchange that runs in this step: one that only learns or only codes."""
        learns = self.until is None or step < self.until
        return dataclasses.replace(self, until=None if learns else 0)

    def init(self, like: PyTree) -> State:
        shared = LearnedCodesState(
            autoencoder=self.autoencoder.init(),
            error=jnp.ones((1,), jnp.float32),
            agreed=jnp.zeros((1,), bool),
        )
        return State(shared, own=self._codec(like).init())

    def mean(self, x: PyTree, state: State, comm: Comm) -> Averaged:
        codec, vectors = self._codec(x), _parts.vectors(x)
        if not _chosen(codec):
            dense = AllReduce()
            return dense.mean(x, dense.init(x), comm)._replace(state=state)
        found = codec.compress(vectors, state.own, comm.step)
        turn = _Turn(codec, vectors, codec.apart(found.payloads), comm)
        out, agreed = self._outcome(turn, state.shared)
        mean = [part + out.stats.poison for part in turn.whole(out.mean, out.dense, out.sides)]
        sent = turn.whole(out.sent, turn.dense, out.sides)
        return Averaged(
            mean=_parts.rebuild(mean, x),
            error=jax.tree.map(jnp.subtract, x, _parts.rebuild(sent, x)),
            state=State(LearnedCodesState(out.autoencoder, out.error, agreed), found.state),
            stats=out.stats,
        )

    def _outcome(self, turn: "_Turn", state: LearnedCodesState) -> tuple["_Outcome", jax.Array]:
        """Learn or code in this step; also return `agreed` of the next state."""

        def code(params: PyTree) -> _Outcome:
            if self.until:
                # Workers may have rounded differently in learning, so they take the leader's.
                params = lax.cond(state.agreed[0], lambda p: p, turn.broadcast, params)
            by = self._code_by_leader if self.variant == "leader" else self._code_by_sum
            return by(turn, params, state.error)

        def learn(params: PyTree) -> _Outcome:
            return self._learn(turn, params)

        def typed_alike(phase: Callable[[PyTree], _Outcome]) -> Callable[[PyTree], _Outcome]:
            def run(params: PyTree) -> _Outcome:
                out = phase(params)
                out = out._replace(stats=Stats.of_all([out.stats]))
                return jax.tree.map(lambda leaf: _axes.vary_like(leaf, out.mean), out)

            return run

        if self.until is None:
            return learn(state.autoencoder), state.agreed
        if self.until == 0:
            return code(state.autoencoder), state.agreed
        learns = jnp.asarray(turn.comm.step.number < self.until)
        phases = (typed_alike(learn), typed_alike(code))
        return lax.cond(learns, *phases, state.autoencoder), ~learns[None]

    def _learn(self, turn: "_Turn", params: PyTree) -> "_Outcome":
        """Gather all workers' values at the leader's positions; train the autoencoder on them."""
        sides, _ = turn.agree(jnp.zeros((0,), jnp.uint32))
        values = turn.at(sides)
        dense, _ = turn.means()
        rows, stats = turn.comm.gather(values, of=turn.vectors)
        pick = self._pick(turn.codec) if self.variant == "leader" else None
        params, error = _autoencoder.learn(
            self.autoencoder, params, rows, turn.leader, pick, self.rate
        )
        mean = jnp.sum(rows * (1.0 / turn.comm.workers), axis=0)
        return _Outcome(mean, values, dense, sides, params, error[None], stats)

    def _code_by_leader(self, turn: "_Turn", params: PyTree, error: jax.Array) -> "_Outcome":
        """Broadcast the code of the leader's values, and gather the innovations of all workers."""
        net, pick = self.autoencoder, self._pick(turn.codec)
        own = jnp.concatenate([turn.payloads[i].main for i in _chosen(turn.codec)])
        code = net.encode(params, _autoencoder.scaled(own)[1]).astype(CODE_DTYPE)
        sides, words = turn.agree(_wire.to_words(code))
        code = _wire.from_words(words, jax.ShapeDtypeStruct(code.shape, code.dtype))
        values = turn.at(sides)
        base = net.decode(params, code.astype(jnp.float32), values.size)
        dense, _ = turn.means()

        size, units = _autoencoder.scaled(values)
        payload = pick.compress(units - base, (), Step()).payload
        weight = net.weight(params)
        whole = base + weight * pick.decompress(payload, values, Step())
        gain = _fit(units, whole, size)
        received, stats = turn.comm.gather((gain[None], payload), of=turn.vectors)
        gains, payloads = received

        scale = 1.0 / turn.comm.workers
        start = jnp.sum(gains * scale) * base
        added = Payload(payloads.main * (gains * weight), payloads.side)
        mean = _sum.add_each(pick, start, added, scale, Step())
        return _Outcome(mean, gain * whole, dense, sides, params, error, stats)

    def _code_by_sum(self, turn: "_Turn", params: PyTree, error: jax.Array) -> "_Outcome":
        """Average the codes of all workers' values at the leader's positions, and decode them."""
        net = self.autoencoder
        sides, _ = turn.agree(jnp.zeros((0,), jnp.uint32))
        values = turn.at(sides)
        size, units = _autoencoder.scaled(values)
        code = net.encode(params, units)

        def decode(code: jax.Array) -> jax.Array:
            return net.decode(params, code, values.size)

        gain = _fit(units, decode(code), size)
        flag = _finite.poison_unless(_finite.all_finite(turn.vectors))
        dense, (flag, total, codes) = turn.means(flag, gain, gain * code)
        center = codes / jnp.where(total > 0, total, 1.0)
        mean = decode(center)
        # A worker's sent values: D(E(u_i)) to first order at the mean code. With factors g_i, the
        # first-order terms of all workers sum to zero.
        _, own = jax.jvp(decode, (_axes.vary_like(center, code),), (code - center,))
        stats = Stats(finite=jnp.isfinite(flag))
        return _Outcome(total * mean, gain * (mean + own), dense, sides, params, error, stats)

    def wire_bytes(self, like: PyTree) -> int:
        if self.until:
            phases = (self.at(0), self.at(self.until))
            return _schedule.common("wire_bytes", self, [p.wire_bytes(like) for p in phases])
        return super().wire_bytes(like)

    def link_bytes(self, like: PyTree, workers: int) -> float:
        if self.until:
            sizes = [p.link_bytes(like, workers) for p in (self.at(0), self.at(self.until))]
            return _schedule.common("link_bytes", self, sizes)
        return super().link_bytes(like, workers)

    def _codec(self, like: PyTree) -> Parts:
        codec = _parts.codec_of(self.codec, like)
        for part, vector in codec.pairs:
            selects = isinstance(part, Selector) and not part.last
            fine = part == Identity() or (selects and not _chain.counts_overflow(part, vector))
            rule = "be a selector of a fixed number of values"
            remedy = "use TopK or ChunkTopK, or Identity() for dense parts."
            check(fine, "LearnedCodes(codec)", rule, repr(part), remedy)
        return codec

    def _pick(self, codec: Parts) -> TopK:
        """Return the selector of a worker's innovation among the values at all positions."""
        n = sum(math.prod(codec.pairs[i][1].shape) for i in _chosen(codec))
        return TopK(k=math.ceil(self.innovation * n))


def _chosen(codec: Parts) -> list[int]:
    """Return the numbers of the parts with a selector. The other parts travel dense."""
    return [i for i, part in enumerate(codec.codecs) if isinstance(part, Selector)]


def _fit(wanted: jax.Array, found: jax.Array, size: jax.Array) -> jax.Array:
    """Return the factor >= 0 for which factor · `found` is closest to `size` · `wanted`.

    Return 0 if this factor is not finite. Then the worker sends zeros, and its residual keeps all.
    """
    factor = size * (jnp.sum(wanted * found) / jnp.sum(jnp.square(found)))
    return jnp.where(jnp.isfinite(factor), jnp.maximum(factor, 0.0), 0.0)


class _Outcome(NamedTuple):
    """Result of a step that learns or codes."""

    mean: jax.Array  # mean of the values at the leader's positions, float32[k]
    sent: jax.Array  # values that this worker sent, float32[k]
    dense: list[jax.Array]  # means of the dense parts
    sides: list[PyTree]  # the leader's positions in the other parts
    autoencoder: PyTree  # next parameters of the autoencoder
    error: jax.Array  # relative error of the autoencoder, float32[1]
    stats: Stats


@dataclasses.dataclass(frozen=True)
class _Turn:
    """One worker's step: the parts, their payloads, and the `Comm`."""

    codec: Parts
    vectors: Vectors
    payloads: tuple[Payload, ...]  # of each part
    comm: Comm

    @property
    def leader(self) -> jax.Array | int:
        return self.comm.step.number % self.comm.workers

    @property
    def dense(self) -> list[jax.Array]:
        keep = set(range(len(self.payloads))).difference(_chosen(self.codec))
        return [self.payloads[i].main for i in sorted(keep)]

    def broadcast(self, tree: PyTree) -> PyTree:
        return self.comm.broadcast(tree, self.comm.index == self.leader)

    def agree(self, words: jax.Array) -> tuple[list[PyTree], jax.Array]:
        """Broadcast the leader's positions and `words` to all workers."""
        sides = [self.payloads[i].side for i in _chosen(self.codec)]
        *sides, words = self.broadcast([*sides, words])
        return sides, words

    def at(self, sides: list[PyTree]) -> jax.Array:
        """Return this worker's values at the leader's positions."""
        found: list[jax.Array] = []
        for i, side in zip(_chosen(self.codec), sides, strict=True):
            selector: Any = self.codec.codecs[i]
            own = _parts.own_step(self.comm.step, jnp.int32(i))
            found.append(_parts.values_at(selector, self.vectors[i], side, own))
        return jnp.concatenate(found)

    def means(self, *others: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        """Average the dense parts and `others` in one all-reduce."""
        means, _ = self.comm.mean([*self.dense, *others])
        return means[: len(self.dense)], means[len(self.dense) :]

    def whole(self, values: jax.Array, dense: list[jax.Array], sides: list[PyTree]) -> Vectors:
        """Decode all parts from the values at the leader's positions and the dense parts."""
        numbers = _chosen(self.codec)
        pieces = _shapes.cut(values, [self.payloads[i].main.size for i in numbers])
        found = dict(zip(numbers, map(Payload, pieces, sides), strict=True))
        others = map(Payload, dense)
        payloads = [found[i] if i in found else next(others) for i in range(len(self.payloads))]
        return self.codec.decompress(self.codec.join(payloads), self.comm.step)


def lgc(
    fraction: float = 0.001,
    *,
    dense: tuple[str, ...] = (),
    dense_steps: int = 200,
    learning_steps: int = 300,
    memory: Memory = ErrorFeedback(),
    **options: Any,
) -> Recipe:
    """Method: train an autoencoder on the top-k values, and then send its codes.

    In the first `dense_steps` steps, gradients travel dense. In the next `learning_steps` steps,
    workers send their values at a leader's positions and train the autoencoder on them. After that,
    they send codes of these values: see `LearnedCodes`. One compiled program runs all steps.

    Args:
      fraction: share of each leaf's values that are sent, in (0, 1].
      dense: words in the paths of leaves that always travel dense. The paper keeps the first layer
        and the last two tensors dense.
      dense_steps: number of first steps, in which all leaves travel dense.
      learning_steps: number of steps after `dense_steps` in which the autoencoder learns.
      memory: memory of the unsent values.
      options: other arguments of `LearnedCodes`: variant, innovation, rate, autoencoder.

    Wire: after `dense_steps`, the positions of k values from the leader. In the last phase also 4
      bits for each value, from the leader, or with "all_reduce" 8 bits for each from each worker.

    Claims: with the default memory, unsent values stay in the residual. In
      docs/results/training.md, a 4-bit quantizer has a much smaller error than the leader's code.

    Differs from the paper: see `LearnedCodes`. The memory is `ErrorFeedback`.

    Example:
      >>> from fftgrad.contrib import learned
      >>> tx = fg.compressed_pmean(learned.lgc(dense=("embed", "head")), axis_name="data")

    References:
      Abrahamyan et al., TNNLS 2021, arXiv:2103.08870.
    """
    check_count("lgc(dense_steps)", dense_steps, "use 200.", least=0)
    check_count("lgc(learning_steps)", learning_steps, "use 300.", least=0)
    codec = DenseByName(dense, TopK(fraction=fraction))
    exchange: Exchange = LearnedCodes(codec, dense_steps + learning_steps, **options)
    if dense_steps:
        exchange = Scheduled({0: AllReduce(), dense_steps: exchange})
    return Recipe(exchange, memory)
