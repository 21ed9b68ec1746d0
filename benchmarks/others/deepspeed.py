"""1-bit Adam by its authors: the exchange of two stages, in plain torch."""

import dataclasses
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from others._both import Row, apart, imported, package, pmean, residual, run, together

import fftgrad as fg

REPOSITORY = "microsoft/DeepSpeed"
LICENSE = "Apache-2.0"
WORKERS, VALUES = 4, 640


@dataclasses.dataclass(frozen=True)
class RootMeanSquare(fg.codecs.Quantizer):
    """Quantizer: the sign of each value, and the root of the mean square of all."""

    def compress(self, x: jax.Array, state: Any, step: fg.Step) -> fg.codecs.Compressed:
        """A bit for each value, in 32."""
        sign = jnp.where(x < 0, -1.0, 1.0)
        return fg.codecs.Compressed(
            fg.codecs.Payload(sign, jnp.sqrt(jnp.mean(jnp.square(x)))[None])
        )

    def decompress(self, payload: fg.codecs.Payload, like: Any, step: fg.Step) -> jax.Array:
        """Signs of one magnitude."""
        return payload.main * payload.side


class Packer:
    """In place of a kernel: bits as bytes."""

    def load(self) -> "Packer":
        """Nothing to load."""
        return self

    def packbits(self, values: Any, size: int, rank: int) -> Any:
        """The signs; zero counts as positive, as in their scale."""
        import torch

        del size, rank
        return torch.from_numpy(np.packbits(values.numpy() >= 0))

    def unpackbits(self, words: Any, size: int, rank: int) -> Any:
        """Ones and minus ones."""
        import torch

        del size, rank
        return torch.from_numpy(2.0 * np.unpackbits(words.numpy()) - 1)


class Gloo:
    """torch.distributed, with a gather that takes a number for an array of one, as NCCL does."""

    def __getattr__(self, name: str) -> Any:
        """The rest as it is."""
        import torch.distributed

        return getattr(torch.distributed, name)

    def all_gather(self, out: list[Any], own: Any, group: Any) -> None:
        """Of the shape that is expected."""
        import torch.distributed

        torch.distributed.all_gather(out, own.reshape(out[0].shape), group=group)


def theirs(rank: int, checkout: pathlib.Path, row: np.ndarray) -> Any:
    """The mean, the error of the worker and that of its shard after one step."""
    import torch

    device = types.SimpleNamespace(current_device_name=lambda: "cpu")
    package(checkout, "deepspeed", comm=Gloo())
    stand_ins: dict[str, Any] = {
        "comm": Gloo(),
        "accelerator": _module(get_accelerator=lambda: device),
        "ops": _module(),
        "ops.op_builder": _module(PackbitsBuilder=Packer),
    }
    sys.modules.update({f"deepspeed.{name}": module for name, module in stand_ins.items()})
    backend = imported(checkout, "deepspeed.runtime.comm.compressed").CompressedBackend()
    error, shard = torch.zeros(VALUES), torch.zeros(VALUES // WORKERS)
    mean = backend.compressed_allreduce(torch.from_numpy(row[rank].copy()), error, shard, rank)
    return mean.numpy(), error.numpy(), shard.numpy()


def _module(**contents: Any) -> Any:
    module = types.ModuleType("stand-in")
    vars(module).update(contents)
    return module


def ours(codec: fg.codecs.Quantizer, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean, and the error of the mean of each shard after one step: its owner keeps w of it."""
    tx = pmean(fg.TwoStage(codec, workers=WORKERS), fg.ErrorFeedback())
    updates, state = run(tx, row[None])
    shards = np.split(residual(state.memory), WORKERS, axis=1)
    return updates[0], np.stack([shards[i][i] for i in range(WORKERS)]) / WORKERS


def compare(checkout: pathlib.Path, smoke: bool) -> Iterator[Row]:
    """Rows for one step, with their magnitude and with ours."""
    del smoke
    rng = np.random.default_rng(9)
    sizes = np.array([1.0, 2.0, 0.5, 4.0])[:, None]  # whose signed sums are never zero
    row = (sizes * rng.choice([-1.0, 1.0], (WORKERS, VALUES))).astype(np.float32)
    (found,) = together(theirs, WORKERS, [(checkout, row)])
    words = f"{VALUES} values of one magnitude on each of {WORKERS} workers, one step"
    mean, shards = ours(RootMeanSquare(), row)
    expected = found[0][0]
    yield Row(
        "`CompressedBackend`, the mean",
        "`TwoStage` of their magnitude",
        words,
        apart(mean, expected),
        differs="the root of the mean square there, a mean magnitude in `Sign`; in later steps one "
        "for all of a worker's values there, one for each shard here",
    )
    error = apart(shards, np.stack([shard for _, _, shard in found]))
    yield Row("its error of the server", "the residual of a shard", words, error)
    mean, _ = ours(fg.Sign(), row)
    others = int(np.sum(np.sign(mean) != np.sign(expected)))
    yield Row("the signs of the mean", "`TwoStage(Sign())`", words, others, f"of {VALUES}")
