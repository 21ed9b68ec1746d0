"""A sum of coefficients that one worker chooses for all, or that all know already."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fftgrad._contracts import (
    Channel,
    Codec,
    Exchange,
    Payload,
    PyTree,
    Reduced,
    Scope,
    Selector,
    State,
)
from fftgrad._values import check_kind, value
from fftgrad.codecs._chain import chain, stages
from fftgrad.exchanges import _parts
from fftgrad.exchanges._parts import Likes, Parts, Vectors
from fftgrad.exchanges._rules import Codecs
from fftgrad.exchanges._supports import LeaderSupport, Support
from fftgrad.ops import _count, _finite
from fftgrad.ops._shapes import spec


class OwnSelection(NamedTuple):
    """What `SharedSupport` keeps as each worker's own.

    Attributes:
      transforms: what each worker's transforms remember.
      selectors: what its selectors remember; `()` where all workers select alike.
    """

    transforms: PyTree
    selectors: PyTree = ()


class Agreed(NamedTuple):
    """What `SharedSupport` keeps that is equal on all workers.

    Attributes:
      support: what the support keeps of the parts that have a selector.
      selectors: what the selectors remember where all workers select alike, else `()`.
    """

    support: list[PyTree]
    selectors: PyTree = ()


@value
class SharedSupport(Exchange):
    """Exchange: all workers send the same coefficients, chosen by one or by the last means.

    With `support=LeaderSupport()` one worker selects its k largest coefficients and broadcasts
    their positions, in Elias-Fano code: at step t worker t mod w, or always the same one. With
    `PredictedSupport()` no position travels: all choose by what the means so far make them expect.

    All-reduces of the k values follow, so the bytes per worker do not grow with the number of
    workers, as those of `AllGather` do, and what is averaged is the same coefficients of all. A
    linear transform may come before the selector: it commutes with the sum, so the support can be
    shared in the frequency domain too.

    With 2 workers, k = 1 and x_0 = [4, 1], x_1 = [1, 2], at step 0 both send coefficient 0 and the
    mean is [2.5, 0]; at step 1 it is [0, 1.5].

    Args:
      codec: linear transforms, then a selector such as `TopK` or `ChunkTopK`; without a selector
        the part is summed dense. Or a rule from a part's name and shape to such a codec.
      support: who chooses: `LeaderSupport()` or `PredictedSupport()`.

    Shapes: x float32[...], or a tuple of parts -> mean, sent of the same shapes.

    Wire: the words of all positions once, then 4 bytes a value (8 if complex), 4 for the finite
      flag and 4 for a codec that counts what it cannot represent, in two all-reduces, whatever the
      number of workers; without the positions, in one all-reduce, if the means choose.

    Claims: all workers get the same bits. If anything is not finite anywhere the mean is NaN
      throughout.

    Differs from the paper: positions in Elias-Fano code; they travel by an all-reduce to which only
      the leader contributes, because XLA has no broadcast from a worker that is chosen at run time.

    Raises:
      TypeError: if `support` is none.
      ValueError: while tracing, if something other than linear transforms and one selector is in
        the chain, or there is no such leader.

    Example:
      >>> exchange = fg.SharedSupport(fg.TopK(k=1))
      >>> x = jnp.array([[4.0, 1.0], [1.0, 2.0]])
      >>> mean = lambda x: exchange.mean(x, exchange.init(x), fg.exchanges.Channel("data")).mean
      >>> jax.vmap(mean, axis_name="data")(x)[0]
      Array([2.5, 0. ], dtype=float32)

    References:
      Chen et al., NeurIPS 2020, arXiv:2104.11125.
    """

    codec: Codecs
    support: Support = LeaderSupport()

    def __post_init__(self) -> None:
        _parts.check_codec("SharedSupport", self.codec)
        if isinstance(self.codec, Codec):
            parts = stages(self.codec)
            cut = next((i for i, stage in enumerate(parts) if not stage.summable), len(parts))
            _check_selector(chain(*parts[cut:]))
        check_kind(
            "SharedSupport(support)",
            self.support,
            Support,
            "use LeaderSupport() or PredictedSupport().",
        )

    @property
    def scope(self) -> Scope:
        return _parts.scope_of(self.codec)

    def init(self, like: PyTree) -> State:
        likes = _parts.vector_likes(like)
        linear, selectors = self._split(like, likes)
        coefficients = _mains(linear, likes)
        chosen = [z for s, z in zip(selectors.codecs, coefficients, strict=True) if _selects(s)]
        kept = self.support.init(list(chosen))
        return self._state(linear.init(likes), selectors.init(coefficients), kept)

    def mean(self, x: PyTree, state: State, channel: Channel) -> Reduced:
        likes, step = _parts.vector_likes(x), channel.step
        linear, selectors = self._split(x, likes)
        vectors = _parts.vectors(x)
        shared: Agreed = state.shared
        spectra = linear.compress(vectors, state.own.transforms, step)
        z = tuple(p.main for p in spectra.payloads)

        chosen = [i for i, selector in enumerate(selectors.codecs) if _selects(selector)]
        scores = list(z)
        for i, kept in zip(chosen, shared.support, strict=True):
            scores[i] = self.support.score(z[i], kept)
        before = state.own.selectors if self.support.sends_positions else shared.selectors
        selected = selectors.compress(tuple(scores), before, step)
        sides = [payload.side for payload in selected.payloads]
        agreed = self.support.agree([sides[i] for i in chosen], channel)
        for i, side in zip(chosen, agreed, strict=True):
            sides[i] = side

        values = list(z)
        for i in chosen:
            values[i] = _selector(selectors, i).at(z[i], sides[i], step)
        chosen_by = jnp.where(self.support.leads(channel), selected.overflow, 0)
        overflow = _count.add(spectra.overflow, chosen_by)
        # One more value, so that what is not chosen cannot hide a NaN.
        flag = _finite.poison_unless(_finite.all_finite(vectors))[None]
        (flag, *means), tally = channel.mean(
            [flag, *values],
            overflow=overflow if self._counts(linear, selectors, likes) else None,
        )

        def back(values: list[jax.Array]) -> Vectors:
            payloads = tuple(Payload(v, side) for v, side in zip(values, sides, strict=True))
            return selectors.decompress(payloads, spec(z), step)

        coefficients = back(means)
        after = [
            self.support.update(kept, _selector(selectors, i), sides[i], coefficients[i], step)
            for i, kept in zip(chosen, shared.support, strict=True)
        ]
        mean = [m + flag for m in linear.undo_linear(coefficients, likes, step)]
        return Reduced(
            mean=_parts.rebuild(mean, x),
            sent=_parts.rebuild(linear.undo_linear(back(values), likes, step), x),
            state=self._state(spectra.state, selected.state, after),
            tally=tally,
        )

    def wire_bytes(self, like: PyTree) -> int:
        likes = _parts.vector_likes(like)
        linear, selectors = self._split(like, likes)
        payloads = selectors.payload_spec(_mains(linear, likes))
        sent = [p if self.support.sends_positions else p.main for p in payloads]
        values = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(sent))
        return 4 + 4 * self._counts(linear, selectors, likes) + values

    def _state(self, transforms: PyTree, selectors: PyTree, support: list[PyTree]) -> State:
        if self.support.sends_positions:
            return State(Agreed(support), OwnSelection(transforms, selectors))
        return State(Agreed(support, selectors), OwnSelection(transforms))

    def _split(self, like: PyTree, likes: Likes) -> tuple[Parts, Parts]:
        """The linear transforms of each part, and its selector, or `Identity` for none."""
        linear, rest = _parts.codec_of(self.codec, like).split_linear(likes)
        for codec in rest.codecs:
            _check_selector(codec)
        return linear, rest

    def _counts(self, linear: Parts, selectors: Parts, likes: Likes) -> bool:
        return linear.counts_overflow(likes) or selectors.counts_overflow(_mains(linear, likes))


def _check_selector(codec: Codec) -> None:
    if not (codec.summable or _selects(codec)):
        raise ValueError(
            "SharedSupport(codec): must be linear transforms and then TopK or ChunkTopK, because "
            f"values are summed as they are, got {codec!r} after what is linear; leave quantizers "
            "out, or use AllGather."
        )


def _selects(codec: Codec) -> bool:
    """Whether it chooses positions, and leaves the values as they are."""
    return isinstance(codec, Selector) and not codec.last


def _selector(selectors: Parts, number: int) -> Selector:
    selector = selectors.codecs[number]
    assert isinstance(selector, Selector)
    return selector


def _mains(linear: Parts, likes: Likes) -> Likes:
    return tuple(payload.main for payload in linear.payload_spec(likes))
