"""What is sent at the support: values while the autoencoder learns them, then its codes."""

from typing import Any

import jax
import jax.numpy as jnp

from fftgrad import _axes
from fftgrad._contracts import Payload, PyTree, Step
from fftgrad.codecs import _sum
from fftgrad.codecs.selectors._top_k import TopK
from fftgrad.contrib import _learn as _training
from fftgrad.contrib._autoencoder import Autoencoder
from fftgrad.contrib._round import Outcome, Round
from fftgrad.exchanges import _alike, _counts, _wire
from fftgrad.ops import _finite

CODE_DTYPE = jnp.bfloat16
"""Of the leader's code, which is broadcast and not added up."""


def learn(turn: Round, net: Autoencoder, params: PyTree, pick: TopK | None, rate: float) -> Outcome:
    """All get all values at the leader's positions, and the autoencoder learns them."""
    sides, _ = turn.agree(jnp.zeros((0,), jnp.uint32))
    values = turn.at(sides)
    dense, _ = turn.means()
    headers, rows = turn.gather(values)
    workers = _axes.size(turn.axis_name)
    lead = turn.leader.number(turn.step, turn.axis_name)
    params, error = _training.learn(net, params, rows, lead, pick, rate)
    return Outcome(
        mean=jnp.sum(rows * (1.0 / workers), axis=0),
        sent=values,
        dense=dense,
        sides=sides,
        autoencoder=params,
        error=error[None],
        **_told(headers, turn),
    )


def code_by_leader(
    turn: Round, net: Autoencoder, params: PyTree, pick: TopK, error: jax.Array
) -> Outcome:
    """The leader sends a code of its values, and each worker what that lacks of its own."""
    code = net.encode(params, _training.scaled(turn.own).units).astype(CODE_DTYPE)
    sides, words = turn.agree(_wire.to_words(code))
    code = _wire.from_words(words, jax.ShapeDtypeStruct(code.shape, code.dtype))
    values = turn.at(sides)
    base = net.decode(params, code.astype(jnp.float32), values.size)
    dense, _ = turn.means()

    size, units = _training.scaled(values)
    payload = pick.compress(units - base, (), Step()).payload
    weight = net.weight(params)
    whole = base + weight * pick.decompress(payload, values, Step())
    gain = fit(units, whole, size)
    headers, (gains, payloads) = turn.gather((gain[None], payload))

    scale = 1.0 / _axes.size(turn.axis_name)
    start = jnp.sum(gains * scale) * base
    added = Payload(payloads.main * (gains * weight), payloads.side)
    return Outcome(
        mean=_sum.add_each(pick, start, added, scale, Step()),
        sent=gain * whole,
        dense=dense,
        sides=sides,
        autoencoder=params,
        error=error,
        **_told(headers, turn),
    )


def code_by_sum(turn: Round, net: Autoencoder, params: PyTree, error: jax.Array) -> Outcome:
    """All send codes of their values at the leader's positions, and the mean code is decoded."""
    sides, _ = turn.agree(jnp.zeros((0,), jnp.uint32))
    values = turn.at(sides)
    size, units = _training.scaled(values)
    code = net.encode(params, units)

    def decode(code: jax.Array) -> jax.Array:
        return net.decode(params, code, values.size)

    gain = fit(units, decode(code), size)
    flag = _finite.poison_unless(_alike.all_finite(turn.vectors))
    who = _counts.term(turn.step, turn.axis_name)
    dense, (flag, total, codes, *told) = turn.means(flag, gain, gain * code, *who)
    center = codes / jnp.where(total > 0, total, 1.0)
    mean = decode(center)
    # To the first order in how far its code is from the mean one, what a worker sent: the terms
    # that it adds to the mean add up to nothing.
    _, own = jax.jvp(decode, (_axes.vary_like(center, code),), (code - center,))
    return Outcome(
        mean=total * mean,
        sent=gain * (mean + own),
        dense=dense,
        sides=sides,
        autoencoder=params,
        error=error,
        finite=jnp.isfinite(flag),
        workers=_counts.number(told),
        invalid=jnp.int32(0),
    )


def fit(wanted: jax.Array, found: jax.Array, size: jax.Array) -> jax.Array:
    """The factor, at least zero, by which what is found comes closest to `size` · wanted.

    Zero where there is none: what is sent is then nothing, and stays with its worker.
    """
    factor = size * (jnp.sum(wanted * found) / jnp.sum(jnp.square(found)))
    return jnp.where(jnp.isfinite(factor), jnp.maximum(factor, 0.0), 0.0)


def _told(headers: _wire.Header, turn: Round) -> dict[str, Any]:
    """What the headers of all workers tell."""
    return {
        "finite": jnp.all(headers.finite),
        "workers": _counts.read(headers.overflow, turn.step)[1],
        "invalid": _wire.count_invalid(headers),
    }
