"""What it does to training to compress what is sharded over the workers themselves.

Adam at one rate: replicated and dense, with the optimizer's state sharded (ZeRO-2), and with the
parameters sharded (ZeRO-3). The bytes are those that a worker sends over a ring, from the compiled
program.
"""

import pathlib
from typing import Any

import jax
from _record import markdown
from methods import AXIS, Method, Setting, Transformation, renamed
from program import Column, Point, Study
from tasks import Batch, constant

import fftgrad as fg

FOUR = fg.chain(fg.Hadamard(block=256), fg.UniformLevels(4, bucket=256, norm="max"))
EIGHT = fg.UniformLevels(8, bucket=256, norm="max")


def of_state(name: str, gradients: fg.Codec, parameters: fg.Codec) -> Method:
    """Shards of the optimizer's state; what encodes gradients, and parameters on their way back."""

    def around(setting: Setting, inner: Transformation) -> Transformation:
        codecs: Any = {"gradients": gradients, "parameters": parameters}
        return fg.optimizers.sharded(inner, setting.workers, axis_name=AXIS, **codecs)

    return Method(name, around=around)


def of_parameters(name: str, parameters: fg.Codec | None) -> Method:
    """Shards of the parameters; without a codec they are gathered as they are."""
    codecs = {"gradients": FOUR, "parameters": parameters}
    return Method(name, around=lambda _, inner: inner, shards=codecs)


class Bytes(Column):
    """Over a worker's link, and of its state."""

    def record(self, end: Point, batch: Batch) -> dict[str, Any]:
        """Both, and how many times less than float32 crosses a link."""
        workers = self.program.mesh.size
        count = sum(p.size for p in jax.tree.leaves(end.params))
        sent = sum(c.link_bytes(workers) for c in fg.audit(self.program.compiled))
        own = [leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(end.state)]
        dense = 2 * 4 * count * (workers - 1) // workers
        return {"link_bytes": sent, "ratio": dense / sent, "state_bytes": sum(own)}


def show(results: dict[str, Any], folder: pathlib.Path, name: str) -> None:
    """The table."""
    del folder, name
    print(tables(results))


def tables(results: dict[str, Any]) -> str:
    """The losses of each row, what it sends, and what a worker keeps."""
    runs = results["runs"]
    base = {run["seed"]: run["loss"] for run in runs if run["method"] == runs[0]["method"]}
    rows: list[list[str]] = []
    for name in dict.fromkeys(run["method"] for run in runs):
        own = [run for run in runs if run["method"] == name]
        losses = ", ".join(f"{run['loss']:.3f}" for run in own)
        to_dense = ", ".join(f"{100 * (run['loss'] / base[run['seed']] - 1):+.1f} %" for run in own)
        sent = f"{own[0]['link_bytes']:,.0f}", f"{own[0]['ratio']:.1f}"
        rows.append([name, losses, to_dense, *sent, f"{own[0]['state_bytes']:,}"])
    columns = ["", "loss of each seed", "to dense", "bytes over the link"]
    columns += ["times fewer than float32", "state a worker, bytes"]
    return markdown(columns, rows)


STUDY = Study(
    folder="sharded",
    file="lm",
    rows=[
        renamed("replicated, dense", "dense"),
        of_state("ZeRO-2, nothing lost", fg.Identity(), fg.Identity()),
        of_state("ZeRO-2, 8 and 8 bits", EIGHT, EIGHT),
        of_state("ZeRO-2, 4 and 8 bits", FOUR, EIGHT),
        of_state("ZeRO-2, 4 and 4 bits", FOUR, FOUR),
        of_parameters("ZeRO-3, 4 bits back", None),
        of_parameters("ZeRO-3, 4 back, 8 forth", EIGHT),
    ],
    show=show,
    rates=(0.5,),
    schedule=constant,
    column=Bytes,
    smoke=("replicated, dense", "ZeRO-2, 4 and 8 bits", "ZeRO-3, 4 back, 8 forth"),
)
