"""LGC: codes that an autoencoder in Flax learns on the way.

It takes an extra: `pip install -e ".[learned]"`.
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
    Channel,
    Codec,
    Exchange,
    Memory,
    PyTree,
    Reduced,
    Scope,
    Selector,
    State,
    Tally,
)
from fftgrad._values import check_choice, check_count, check_kind, value
from fftgrad.codecs import _chain
from fftgrad.codecs._top_k import TopK
from fftgrad.codecs._transforms import Identity
from fftgrad.contrib import _phases
from fftgrad.contrib._autoencoder import Autoencoder
from fftgrad.contrib._phases import Outcome, Round, chosen
from fftgrad.exchanges import _parts, _switch
from fftgrad.exchanges._all_reduce import AllReduce
from fftgrad.exchanges._parts import Likes, Parts
from fftgrad.exchanges._recipe import Recipe
from fftgrad.exchanges._rules import Codecs, DenseByName
from fftgrad.exchanges._scheduled import Scheduled
from fftgrad.exchanges._shared_support import check_leader
from fftgrad.memories._error_feedback import ErrorFeedback
from fftgrad.ops import _wire

__all__ = ["Autoencoder", "LearnedCodes", "LearnedCodesState", "lgc"]

Variant = Literal["leader", "all_reduce"]


class LearnedCodesState(NamedTuple):
    """What the workers of `LearnedCodes` share; their own is what their selectors remember.

    Attributes:
      autoencoder: its parameters, equal on all workers once codes travel.
      error: its relative error in the last step in which it learned, float32[1]; 1 before.
      agreed: whether the parameters of one worker have gone to all since they learned, bool[1].
    """

    autoencoder: PyTree
    error: jax.Array
    agreed: jax.Array


@value
class LearnedCodes(Exchange):
    """Exchange: the coefficients that one worker chooses, in a code that is learned meanwhile.

    As in `SharedSupport` a leader chooses the positions of its largest values. Until step `until`
    all workers send all others their values there, exactly, and each makes the same step of descent
    of an autoencoder E, D on them. From then on codes travel. With u_i the values of worker i in
    units of their root mean square, and L the leader,

        "leader":      D(E(u_L)) + b J_i,  J_i the largest of u_i - D(E(u_L)), which each sends,
        "all_reduce":  D(Σ_i g_i E(u_i) / Σ_i g_i), the codes being summed by an all-reduce,

    stands for u_i, and g_i times that for worker i's values. The scale g_i is the factor by which
    its own code comes closest to them, or 0, so that nothing is sent, if no factor helps. Half of
    the loss of the autoencoder is its error, the other half the variance of the workers' codes.

    Behind a dense start it is `Scheduled({0: AllReduce(), 200: LearnedCodes(codec, until=500)})`.

    Args:
      codec: a selector of a fixed number of values, such as `TopK`; or a rule from a part's name
        and shape to one, or to `Identity()` for what travels dense.
      until: the step from which codes travel; None to learn for ever, 0 never to.
      variant: "leader" or "all_reduce".
      innovation: the share of its values that each worker sends of what the leader's code lacks;
        at least one value.
      rate: of the autoencoder's descent, which is plain, with gradients of length 1 at the most.
      leader: the number of the worker that chooses the positions; None for all in turn.
      autoencoder: its layers.

    Shapes: x float32[...], or a tuple of parts -> mean, error of the same shapes.

    Wire: the words of all positions once, and 4 bytes a value of the parts that travel dense. While
      it learns, 4 + 4k bytes to all. With a leader, a code of 2 bytes a number, k / 4 of them by
      default, once, and 12 bytes and the innovation, 4m and positions, to all. With an all-reduce 8
      bytes and codes of 4 bytes a number. The step from which codes travel has the autoencoder's
      parameters too, 4 bytes each, from one worker to all. `.at(step).wire_bytes(x)`.

    Claims: all workers get the same bits. What is sent of a worker's values is their mean in both
      variants, to rounding, so that error feedback loses nothing. With a leader ||x - sent||² <=
      ||x||², whatever the autoencoder has learned; with an all-reduce that need not be so, because
      what counts as sent is g_i (D(c) + D'(c) (E(u_i) - c)), c the mean code, D' the derivative:
      a decoder that is not linear has no other share of each worker in its mean. If anything
      is not finite anywhere the mean is NaN throughout.

    Differs from the paper: this follows its abstract and a public implementation, because the full
      text was not at hand. One code for the values of all parts, padded with zeros to whole
      strides, instead of one for each layer. Ours are the scales g_i, units of root mean squares,
      innovations that are what the code lacks instead of the largest values, clipped gradients, a
      leader's code in bfloat16, and that the autoencoder learns what its variant decodes: every
      worker's values from the leader's code, or the mean from the mean code.

    Raises:
      ValueError: if `until` is negative or a rate not positive; while tracing, if something other
        than a selector of a fixed number of values is to choose, or the bytes are asked for that
        change by step.
      TypeError: if `autoencoder` is none.

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
    leader: int | None = None
    autoencoder: Autoencoder = Autoencoder()

    def __post_init__(self) -> None:
        _parts.check_codec("LearnedCodes", self.codec)
        if isinstance(self.codec, Codec):
            _check_selector(self.codec)
        if self.until is not None and self.until < 0:
            raise ValueError(
                f"LearnedCodes(until): must be a step, from 0 on, got {self.until}; use 500, or "
                "None to learn for ever."
            )
        if not (0 < self.innovation <= 1 and self.rate > 0):
            raise ValueError(
                "LearnedCodes(innovation, rate): must be a share in (0, 1] and a positive rate, "
                f"got {self.innovation} and {self.rate}; use 1e-5 and 1e-3."
            )
        check_choice("LearnedCodes(variant)", self.variant, get_args(Variant))
        check_leader("LearnedCodes", self.leader)
        check_kind("LearnedCodes(autoencoder)", self.autoencoder, Autoencoder, "use Autoencoder().")

    @property
    def scope(self) -> Scope:
        return _parts.scope_of(self.codec)

    def at(self, step: int) -> "LearnedCodes":
        """The exchange of the phase of a step: one that only learns, or one that only codes."""
        learns = self.until is None or step < self.until
        return dataclasses.replace(self, until=None if learns else 0)

    def init(self, like: PyTree) -> State:
        likes = _parts.vector_likes(like)
        shared = LearnedCodesState(
            autoencoder=self.autoencoder.init(),
            error=jnp.ones((1,), jnp.float32),
            agreed=jnp.zeros((1,), bool),
        )
        return State(shared, own=self._codec(like, likes).init(likes))

    def mean(self, x: PyTree, state: State, channel: Channel) -> Reduced:
        likes, vectors = _parts.vector_likes(x), _parts.vectors(x)
        codec = self._codec(x, likes)
        if not chosen(codec):
            dense = AllReduce()
            return dense.mean(x, dense.init(x), channel)._replace(state=state)
        found = codec.compress(vectors, state.own, channel.step)
        turn = Round(codec, likes, vectors, found.payloads, self.leader, channel)
        out, agreed = self._outcome(turn, state.shared)
        mean = [part + out.tally.poison for part in turn.whole(out.mean, out.dense, out.sides)]
        sent = turn.whole(out.sent, turn.dense, out.sides)
        return Reduced(
            mean=_parts.rebuild(mean, x),
            error=jax.tree.map(jnp.subtract, x, _parts.rebuild(sent, x)),
            state=State(LearnedCodesState(out.autoencoder, out.error, agreed), found.state),
            tally=out.tally,
        )

    def _outcome(self, turn: Round, state: LearnedCodesState) -> tuple[Outcome, jax.Array]:
        """What the phase of the step comes to, and whether the autoencoder is that of all."""
        net, pick = self.autoencoder, self._pick(turn.codec, turn.likes)
        leading = self.variant == "leader"

        def learn(params: PyTree) -> Outcome:
            return _phases.learn(turn, net, params, pick if leading else None, self.rate)

        def code(params: PyTree) -> Outcome:
            if self.until:
                # Equal up to then only as far as devices add up alike.
                params = lax.cond(state.agreed[0], lambda p: p, turn.broadcast, params)
            if leading:
                return _phases.code_by_leader(turn, net, params, pick, state.error)
            return _phases.code_by_sum(turn, net, params, state.error)

        def typed_alike(phase: Callable[[PyTree], Outcome]) -> Callable[[PyTree], Outcome]:
            def run(params: PyTree) -> Outcome:
                out = phase(params)
                out = out._replace(tally=Tally.of_all([out.tally]))
                return jax.tree.map(lambda leaf: _axes.vary_like(leaf, out.mean), out)

            return run

        if self.until is None:
            return learn(state.autoencoder), state.agreed
        if self.until == 0:
            return code(state.autoencoder), state.agreed
        learns = jnp.asarray(turn.channel.step.number < self.until)
        phases = (typed_alike(learn), typed_alike(code))
        return lax.cond(learns, *phases, state.autoencoder), ~learns[None]

    def wire_bytes(self, like: PyTree) -> int:
        if self.until:
            phases = (self.at(0), self.at(self.until))
            return _switch.common_bytes("LearnedCodes", phases, like)
        likes = _parts.vector_likes(like)
        codec = self._codec(like, likes)
        if not chosen(codec):
            return AllReduce().wire_bytes(like)
        payloads = codec.payload_spec(likes)
        k = sum(math.prod(payloads[i].main.shape) for i in chosen(codec))
        code = math.prod(self.autoencoder.code_shape(k))
        dense = sum(4 * math.prod(p.main.shape) for p in payloads) - 4 * k
        always = dense + sum(4 * leaf.size for leaf in jax.tree.leaves([p.side for p in payloads]))
        vector = jax.ShapeDtypeStruct((k,), jnp.float32)
        if self.until is None:
            return always + _wire.nbytes(vector)
        if self.variant == "all_reduce":
            return always + 8 + 4 * code
        gain = jax.ShapeDtypeStruct((1,), jnp.float32)
        innovation = _chain.payload_spec(self._pick(codec, likes), vector)
        words = -(-code * jnp.dtype(_phases.CODE_DTYPE).itemsize // 4)
        return always + 4 * words + _wire.nbytes((gain, innovation))

    def link_bytes(self, like: PyTree, workers: int) -> float:
        if self.until:
            phases = (self.at(0), self.at(self.until))
            return _switch.common_link_bytes("LearnedCodes", phases, like, workers)
        return super().link_bytes(like, workers)

    def _codec(self, like: PyTree, likes: Likes) -> Parts:
        codec = _parts.codec_of(self.codec, like)
        for part, vector in zip(codec.codecs, likes, strict=True):
            _check_selector(part)
            if _chain.counts_overflow(part, vector):
                raise ValueError(
                    f"LearnedCodes(codec): must select a fixed number of values, got {part!r}; use "
                    "TopK or ChunkTopK."
                )
        return codec

    def _pick(self, codec: Parts, likes: Likes) -> TopK:
        """The innovation of a worker, of all the values at the support."""
        n = sum(math.prod(likes[i].shape) for i in chosen(codec))
        return TopK(k=math.ceil(self.innovation * n))


def _check_selector(codec: Codec) -> None:
    if not (codec == Identity() or (isinstance(codec, Selector) and not codec.last)):
        raise ValueError(
            "LearnedCodes(codec): must be a selector such as TopK, or Identity() for what travels "
            f"dense, because the autoencoder codes the values, got {codec!r}; leave transforms and "
            "quantizers out."
        )


def lgc(
    fraction: float = 0.001,
    *,
    dense: tuple[str, ...] = (),
    dense_steps: int = 200,
    learning_steps: int = 300,
    memory: Memory = ErrorFeedback(),
    **options: Any,
) -> Recipe:
    """Method: an autoencoder learns the values of the top k, and then its codes travel.

    For `dense_steps` gradients travel dense. For `learning_steps` the workers send the values at
    the positions that a leader chooses, and all train the autoencoder on them. From then on they
    send codes of these values: see `LearnedCodes`. All of it is one program.

    Args:
      fraction: share of each leaf whose values are sent, in (0, 1].
      dense: words in the paths of leaves that always travel dense. The paper leaves out the first
        layer and the last two tensors: a gradient is a tree in the order of names, and which leaves
        these are only you know.
      dense_steps: for how many steps everything travels dense.
      learning_steps: for how many steps after them the autoencoder learns.
      memory: what is done with what a step does not send.
      options: other arguments of `LearnedCodes`: variant, innovation, rate, leader, autoencoder.

    Wire: of the n values of the leaves that are not dense, k = fraction · n, in the end 4 bits a
      value from one worker, or 8 from each with "all_reduce", and positions once.

    Claims: with the default memory nothing is lost (`ErrorFeedback`). By docs/results/training.md a
      quantizer of 4 bits has far less error at the bits of the leader's code.

    Differs from the paper: see `LearnedCodes`. The memory is plain error feedback.

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
