"""A sum of coefficients that one worker chooses for all."""

import jax
import jax.numpy as jnp

from fftgrad._contracts import (
    Averaged,
    Codec,
    Comm,
    Exchange,
    Payload,
    PyTree,
    Scope,
    Selector,
    State,
)
from fftgrad._values import check, check_count, value
from fftgrad.codecs._chain import chain, split_linear, stages
from fftgrad.exchanges import _parts
from fftgrad.exchanges._parts import Codecs, Parts, Vectors
from fftgrad.ops import _count, _finite

IN_TURN = "leave it out to let all lead in turn."


@value
class LeaderTopK(Exchange):
    """Exchange: one worker, the leader, chooses the coefficients that all workers send.

    The leader selects its k largest coefficients and broadcasts their positions in Elias-Fano code.
    An all-reduce then sums the values of all workers at these positions. So the bytes per worker do
    not grow with the number of workers, unlike those of `AllGather`. A linear transform may precede
    the selector, because it commutes with the sum.

    Args:
      codec: linear transforms, then a selector such as `TopK` or `ChunkTopK`, or a rule that
        returns such codecs. Without a selector, all coefficients are summed.
      leader: number of the worker that leads in all steps. None: worker t mod w leads in step t.

    Wire: the positions of the leader in one all-reduce. A second all-reduce has 4 bytes for each
      selected value (8 if complex), 4 bytes for a flag, and 4 if the codec counts overflow.

    Claims: all workers get the same bits. If any value is not finite, the mean is NaN throughout.

    Differs from the paper: positions are in Elias-Fano code. An all-reduce broadcasts them, with
      zeros from the other workers, because XLA cannot broadcast from a worker chosen at run time.

    Raises:
      ValueError: if a codec has stages other than linear transforms and one selector (for a rule,
        while tracing); while tracing, if `leader` is not the number of a worker.

    Example:
      >>> exchange = fg.exchanges.LeaderTopK(fg.TopK(k=1))
      >>> x = jnp.array([[4.0, 1.0], [1.0, 2.0]])
      >>> mean = lambda x: exchange.mean(x, exchange.init(x), fg.exchanges.Comm("data")).mean
      >>> jax.vmap(mean, axis_name="data")(x)[0]
      Array([2.5, 0. ], dtype=float32)

    References:
      Chen et al., NeurIPS 2020, arXiv:2104.11125.
    """

    codec: Codecs
    leader: int | None = None

    def __post_init__(self) -> None:
        _parts.check_codec("LeaderTopK", self.codec)
        if isinstance(self.codec, Codec):
            parts = stages(self.codec)
            cut = next((i for i, stage in enumerate(parts) if not stage.summable), len(parts))
            _check_selector(chain(*parts[cut:]))
        if self.leader is not None:
            check_count("LeaderTopK(leader)", self.leader, IN_TURN, least=0)

    @property
    def scope(self) -> Scope:
        return _parts.scope_of(self.codec)

    def init(self, like: PyTree) -> State:
        linear, selectors = self._split(like)
        return State(own=(linear.init(), selectors.init()))

    def mean(self, x: PyTree, state: State, comm: Comm) -> Averaged:
        step, vectors = comm.step, _parts.vectors(x)
        linear, selectors = self._split(x)
        before, chosen = state.own
        if self.leader is not None:
            check_count("LeaderTopK(leader)", self.leader, IN_TURN, 0, comm.workers - 1)
        in_turn = self.leader is None
        leads = comm.index == (comm.step.number % comm.workers if in_turn else self.leader)
        spectra = linear.compress(vectors, before, step)
        z = tuple(p.main for p in linear.apart(spectra.payloads))

        selected = selectors.compress(z, chosen, step)
        sides = comm.broadcast(
            [payload.side for payload in selectors.apart(selected.payloads)], leads
        )
        values = [
            _parts.values_at(selector, part, side, step) if isinstance(selector, Selector) else part
            for selector, part, side in zip(selectors.codecs, z, sides, strict=True)
        ]
        overflow = _count.add(spectra.overflow, jnp.where(leads, selected.overflow, 0))
        # The flag reports a NaN among the values that are not selected.
        flag = _finite.poison_unless(_finite.all_finite(vectors))[None]
        (flag, *means), stats = comm.mean(
            [flag, *values],
            overflow=overflow if linear.counts_overflow or selectors.counts_overflow else None,
        )

        def back(values: list[jax.Array]) -> Vectors:
            payloads = tuple(Payload(v, side) for v, side in zip(values, sides, strict=True))
            totals = selectors.decompress_groups(selectors.join(payloads), step)
            return linear.undo_linear(totals, step)

        return Averaged(
            mean=_parts.rebuild([mean + flag for mean in back(means)], x),
            error=jax.tree.map(jnp.subtract, x, _parts.rebuild(back(values), x)),
            state=State(own=(spectra.state, selected.state)),
            stats=stats,
        )

    def wire_bytes(self, like: PyTree) -> int:
        linear, selectors = self._split(like)
        leaves = jax.tree.leaves(selectors.payload_spec)
        sent = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        return 4 + 4 * (linear.counts_overflow or selectors.counts_overflow) + sent

    def _split(self, like: PyTree) -> tuple[Parts, Parts]:
        """Split each codec into linear transforms and a selector, or `Identity` without one."""
        linear, rest = _parts.codec_of(self.codec, like).split(split_linear)
        for codec in rest.codecs:
            _check_selector(codec)
        return linear, rest


def _check_selector(codec: Codec) -> None:
    selects = isinstance(codec, Selector) and not codec.last
    rule = "be linear transforms and then TopK or ChunkTopK"
    remedy = "leave quantizers out, or use AllGather."
    check(codec.summable or selects, "LeaderTopK(codec)", rule, repr(codec), remedy)
