"""What each codec sends for a vector, and what comes of it there: one program a codec, for all."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fftgrad as fg
from fftgrad.codecs._chain import payload_spec
from fftgrad.ops import _wire

STEP = fg.Step.of(3)
N = 1009
LIKE = jax.ShapeDtypeStruct((N,), jnp.float32)


compress = jax.jit(fg.compress, static_argnums=0)
decompress = jax.jit(fg.decompress, static_argnums=0)


def draws(codec: fg.codecs.Codec) -> bool:
    """Whether it rounds by chance: another program may then round a value to the other side."""
    return any(word in repr(codec) for word in ("UniformQuantizer", "Ternary"))


@functools.partial(jax.jit, static_argnums=0)
def gathered(codec: fg.codecs.Codec, rows: np.ndarray):
    """The mean of `AllGather`, the values it sent, and those that the codec decodes to."""
    exchange = fg.AllGather(codec)

    def one(x):
        local = jax.random.fold_in(STEP.local, jax.lax.axis_index("data"))
        step = STEP._replace(local=local)  # so a receiver has not the key of the sender
        out = exchange.mean(x, exchange.init(x), fg.exchanges.Comm("data", step))
        own = fg.decompress(codec, fg.compress(codec, x, step=step), x, step=step)
        return out.mean, x - out.error, own

    return jax.vmap(one, axis_name="data")(rows)


class Message(NamedTuple):
    """The buffer, what was packed into it, and what is unpacked from it: finite or not, values."""

    words: np.ndarray
    payload: fg.codecs.Payload
    finite: bool
    values: np.ndarray


@functools.cache
def both_ways(codec: fg.codecs.Codec):
    """The program from a vector and a buffer: what is sent of the one and decoded from the other.

    One program, of which the halves have nothing in common.
    """

    def run(x, words):
        payload = fg.compress(codec, x, step=STEP)
        received, finite, _ = _wire.unpack(words, payload_spec(codec, LIKE))
        back = fg.decompress(codec, received, LIKE, step=STEP)
        return (_wire.pack(payload), payload), (finite, back)

    return jax.jit(run)


def send(codec: fg.codecs.Codec, x: np.ndarray):
    """A buffer and its payload."""
    return both_ways(codec)(x, np.zeros(fg.wire_bytes(codec, LIKE) // 4, np.uint32))[0]


def receive(codec: fg.codecs.Codec, words: np.ndarray):
    """Whether the sender's values were finite, and the values."""
    return both_ways(codec)(np.zeros(N, np.float32), words)[1]


def message(codec: fg.codecs.Codec, x: np.ndarray) -> Message:
    """A vector float32[N], sent and received."""
    x = np.asarray(x, np.float32)
    return _message(codec, x.tobytes())


@functools.cache
def _message(codec: fg.codecs.Codec, data: bytes) -> Message:
    words, payload = send(codec, np.frombuffer(data, np.float32))
    finite, values = receive(codec, words)
    payload = jax.tree.map(np.asarray, payload)
    return Message(np.asarray(words), payload, bool(finite), np.asarray(values))
