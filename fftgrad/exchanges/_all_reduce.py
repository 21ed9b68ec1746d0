"""A sum of payloads by one all-reduce."""

import jax
import jax.numpy as jnp

from fftgrad._contracts import Averaged, Codec, Comm, Exchange, PyTree, Scope, Selector, State
from fftgrad._values import check, value
from fftgrad.codecs import _chain
from fftgrad.codecs._transforms import Identity
from fftgrad.exchanges import _parts
from fftgrad.exchanges._parts import Codecs, Parts, Payloads


@value
class AllReduce(Exchange):
    """Exchange: sum the payloads with one all-reduce; without a codec, the dense mean.

    For w workers: mean = decompress(Σ_i compress(x_i / w)). The division comes first, so the sum
    is finite if the mean is.

    Args:
      codec: a summable codec, or a function from a part's name and shape to a summable codec.
        `Identity()` is the dense baseline: `jax.lax.pmean` in float32, for leaves of any dtype.

    Wire: the payload, 4n bytes for n values without a codec. A count of overflow adds 4 bytes. A
      ring sends 2 (w - 1) / w times as many. There is no header, because a sum propagates NaN.

    Claims: exact up to rounding; all workers get the same bits.

    Raises:
      ValueError: if the codec is not summable.

    Example:
      >>> x = jnp.outer(jnp.arange(4.0), jnp.array([1.0, 2.0]))
      >>> exchange = fg.AllReduce()
      >>> mean = lambda x: exchange.mean(x, exchange.init(x), fg.exchanges.Comm("data")).mean
      >>> jax.vmap(mean, axis_name="data")(x)[0]
      Array([1.5, 3. ], dtype=float32)
    """

    codec: Codecs = Identity()

    def __post_init__(self) -> None:
        _parts.check_codec("AllReduce", self.codec)
        if isinstance(self.codec, Codec):
            _check_summable(self.codec)

    @property
    def scope(self) -> Scope | None:
        return None if self.codec == Identity() else _parts.scope_of(self.codec)

    def init(self, like: PyTree) -> State:
        return State(own=self._codec(like).init())

    def mean(self, x: PyTree, state: State, comm: Comm) -> Averaged:
        codec = self._codec(x)
        out = codec.compress(_parts.vectors(x), state.own, comm.step)
        leaves, structure = jax.tree.flatten(out.payloads)
        overflow = out.overflow if codec.counts_overflow else None
        means, stats = comm.mean(leaves, overflow=overflow)

        def decompress(leaves: list[jax.Array]) -> PyTree:
            payloads: Payloads = jax.tree.unflatten(structure, leaves)
            return _parts.rebuild(codec.decompress(payloads, comm.step), x)

        error = jax.tree.map(jnp.subtract, x, decompress(leaves))
        return Averaged(decompress(means), error, State(own=out.state), stats)

    def _codec(self, like: PyTree) -> Parts:
        codec = _parts.codec_of(self.codec, like)
        for part in codec.codecs:
            _check_summable(part)
        return codec


def _check_summable(codec: Codec) -> None:
    # If a codec sends all values, an all-gather soon takes more bytes than a dense all-reduce.
    selects = any(isinstance(stage, Selector) for stage in _chain.stages(codec))
    instead = f"AllGather({codec!r})" if selects else f"TwoStage({codec!r}, workers=w)"
    check(codec.summable, "AllReduce(codec)", "be summable", repr(codec), f"use {instead}.")
