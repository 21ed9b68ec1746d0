"""How long codecs and collectives take on this machine, beside a copy of the memory."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import fftgrad as fg
from fftgrad.advise._timing import Task, Timed, timed_in_turn
from fftgrad.advise.commands._show import progress

CODECS: dict[str, fg.Codec] = {
    "bfloat16": fg.Cast("bfloat16"),
    "8 bits": fg.RangeFloat(bits=8),
    "QSGD, 4 bits": fg.UniformLevels(bits=4),
    "ternary": fg.Ternary(),
    "sign": fg.Sign(),
    "EDEN, 2 bits": fg.chain(fg.Hadamard(), fg.codecs.LloydMax(bits=2)),
    "top-k 1 %": fg.chain(fg.TopK(fraction=0.01), fg.LogLevels(bits=4)),
    "top-k 0.1 %": fg.chain(fg.TopK(fraction=0.001), fg.LogLevels(bits=4)),
    "threshold 1 %": fg.chain(fg.Threshold(fraction=0.01), fg.LogLevels(bits=4)),
    "random-k 1 %": fg.RandomK(fraction=0.01),
    "FFT 64, 1 %": fg.chain(fg.Fft(block=64), fg.TopK(fraction=0.01), fg.LogLevels(bits=4)),
    "DCT 64, DeMo": fg.chain(fg.Dct(block=64), fg.ChunkTopK(chunk=64), fg.Cast("bfloat16")),
    "DCT 64, budget": fg.chain(fg.Dct(block=64), fg.Budget(ratio=100)),
    "budget": fg.Budget(ratio=100),
}
"""One of each family, by short names."""

INPUTS = 3


class CodecTimes(NamedTuple):
    """One codec at one size."""

    name: str  # a short one
    codec: str  # the call that makes it
    compress: Timed  # seconds
    decompress: Timed
    bytes_per_second: float  # of float32 input, while compressing
    copies: float  # both together, in times of a memory copy
    wire_bytes: int  # of one payload
    ratio: float  # bytes of float32 / wire bytes
    # bytes per second. Of two workers over a faster link, none gains by it: it saves fewer bytes
    # than the link would have sent in the time it takes
    pays_below: float


class SizeTimes(NamedTuple):
    """What was found for vectors of one length, and for a copy of one."""

    values: int
    copy: Timed
    codecs: tuple[CodecTimes, ...]


class SumTime(NamedTuple):
    """The sum of a float32 vector over all devices of this process."""

    values: int
    devices: int
    time: Timed


def heavy_tailed(n: int) -> np.ndarray:
    """Values as those of gradients are: heavy tails, neighbors alike; none of them zero."""
    white = np.random.default_rng(0).standard_t(3, n + 1).astype(np.float32)
    return white[1:] + np.float32(0.5) * white[:-1]


def inputs_of(x: np.ndarray) -> list[tuple[jax.Array, fg.Step]]:
    """A vector in three places and scales, each with randomness of its own."""
    return [
        (jnp.asarray(np.roll(x, i * (x.size // INPUTS)) * np.float32(1 + i)), fg.Step.of(i, i))
        for i in range(INPUTS)
    ]


def time_codecs(x: np.ndarray, names: Sequence[str], seconds: float) -> SizeTimes:
    """The times of codecs on a vector, in about so many seconds, and those of compiling."""
    inputs, like = inputs_of(x), jax.ShapeDtypeStruct(x.shape, jnp.float32)
    tasks: list[Task] = [(jax.jit(lambda a: -a[0]), inputs)]
    with progress("compiling", len(names)) as tell:
        for name in names:
            tasks += _both_ways(CODECS[name], inputs, like)
            tell(1)
    with progress("timing", seconds) as tell:
        copy, *times = timed_in_turn(tasks, seconds / len(tasks), tell=tell)
    rows = zip(names, times[::2], times[1::2], strict=True)
    return SizeTimes(x.size, copy, tuple(_row(name, like, copy, *both) for name, *both in rows))


def _both_ways(codec: fg.Codec, inputs: Any, like: jax.ShapeDtypeStruct) -> list[Task]:
    @jax.jit
    def down(a: tuple[jax.Array, fg.Step]) -> fg.Payload:
        return fg.compress(codec, a[0], step=a[1])

    @jax.jit
    def up(a: tuple[fg.Payload, fg.Step]) -> jax.Array:
        return fg.decompress(codec, a[0], like, step=a[1])

    payloads = [(down(one), one[1]) for one in inputs]
    jax.block_until_ready(up(payloads[0]))
    return [(down, inputs), (up, payloads)]


def _row(name: str, like: jax.ShapeDtypeStruct, copy: Timed, down: Timed, up: Timed) -> CodecTimes:
    codec, dense = CODECS[name], 4 * like.size
    sent, both = fg.wire_bytes(codec, like), down.seconds + up.seconds
    return CodecTimes(
        name=name,
        codec=repr(codec),
        compress=down,
        decompress=up,
        bytes_per_second=dense / down.seconds,
        copies=both / copy.seconds,
        wire_bytes=sent,
        ratio=dense / sent,
        pays_below=max(0.0, (dense - sent) / both),
    )


def time_collectives(sizes: Sequence[int], seconds: float) -> tuple[SumTime, ...]:
    """The times of an all-reduce over all devices of this process; none where there is one."""
    devices = jax.local_devices()
    if len(devices) < 2:
        return ()
    mesh = jax.make_mesh((len(devices),), ("worker",), devices=devices)
    spec = jax.NamedSharding(mesh, P("worker"))
    mean = jax.jit(
        jax.shard_map(
            lambda x: lax.pmean(x[0], "worker"), mesh=mesh, in_specs=P("worker"), out_specs=P()
        )
    )
    tasks: list[Task] = []
    for n in sizes:
        whole = np.stack([np.roll(heavy_tailed(n), i) for i in range(len(devices))])
        tasks.append((mean, [jax.device_put(whole * k, spec) for k in (1.0, 2.0)]))
    with progress("all-reduce", seconds) as tell:
        times = timed_in_turn(tasks, seconds / len(tasks), tell=tell)
    return tuple(SumTime(n, len(devices), time) for n, time in zip(sizes, times, strict=True))
