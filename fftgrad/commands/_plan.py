"""`fftgrad plan`: whether compression pays over a link, and which."""

import argparse
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from fftgrad import planning
from fftgrad.commands import _files, _json
from fftgrad.commands._arguments import add_outputs, count, in_file, number, seconds, tells
from fftgrad.commands._progress import waiting
from fftgrad.commands._text import bits_per_second, quantity, table, three_digits
from fftgrad.planning import Plan, PlanRow
from fftgrad.tools import Link, load_gradients

HELP = "whether compression pays over your link, which one, and the code for it"
EPILOG = """\
25 million parameters, 16 workers, links of 1 Gbit/s, 300 ms to compute a step:
  fftgrad plan --parameters 25M --workers 16 --bandwidth 1gbit --step 300ms
your own model, and what each method loses of its gradients:
  fftgrad plan --gradients step.npz --workers 16 --bandwidth 1gbit --step 300ms
"""

LEGEND = """\
times: the steps that it makes in one step of the best dense. codec: compressing
and decompressing, timed here. link: bytes that leave a worker in a step. pays
below: over a faster link the best dense wins. loss: what came of it in runs of
small models."""

MATRICES = 16
SAMPLES = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `plan`."""
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--parameters",
        type=count,
        metavar="N",
        help=f"how many, as 25M: in {MATRICES} square matrices, and a vector of the rest",
    )
    model.add_argument(
        "--params",
        type=in_file,
        metavar="FILE",
        help="the parameters, of which the shapes are read: .npz, .npy, .safetensors",
    )
    parser.add_argument(
        "--gradients",
        type=in_file,
        metavar="FILE",
        help="those of a step, to measure errors on; without --params also the shapes",
    )
    parser.add_argument("--workers", type=count, required=True, metavar="N", help="how many")
    parser.add_argument(
        "--bandwidth",
        type=number,
        required=True,
        metavar="RATE",
        help="of the link of a worker: 100mbit, 1gbit, or bytes per second as a number",
    )
    parser.add_argument(
        "--latency",
        type=number,
        default="100us",
        metavar="TIME",
        help="of a message: 2ms, or seconds as a number (default: 100us)",
    )
    parser.add_argument(
        "--step",
        type=number,
        required=True,
        metavar="TIME",
        help="what a step takes without any exchange: 300ms, or seconds as a number",
    )
    parser.add_argument("--buckets", type=count, metavar="N", help="in how many a gradient travels")
    parser.add_argument(
        "--seconds",
        type=seconds,
        default=0.5,
        metavar="S",
        help="how long to time each codec on this machine (default: 0.5)",
    )
    parser.add_argument(
        "--top", type=count, default=10, metavar="N", help="rows to show (default: 10)"
    )
    add_outputs(parser, "what a step is made of as bars")


def run(args: argparse.Namespace, console: Console) -> int:
    """Plans, and prints the table, the answer and the code."""
    link = Link(args.bandwidth, args.latency)
    samples = _samples(args)
    params = _params(args, samples)
    with waiting("timing here") as tell:
        measured = planning.measure(
            params,
            step=args.step,
            workers=args.workers,
            link=link,
            gradients=samples,
            buckets=args.buckets,
            seconds=args.seconds,
            tell=tell,
        )
    found = planning.plan(params, **measured._asdict(), gradients=samples, buckets=args.buckets)
    dense = min((row for row in found.rows if row.break_even is None), key=_seconds)
    shown = list(found.rows[: args.top])
    if dense not in shown:
        shown.append(dense)
    if tells(args):
        _show(shown, console)
        console.print(f"\n{answer(found, dense)}\n", markup=False, highlight=False)
        console.print(found.best.code, markup=False, highlight=False, soft_wrap=True)
    record = measured._asdict() | {"link": vars(link), "device": jax.devices()[0].device_kind}
    answers = {"compress": found.compress, "best": found.best.name, "rows": found.rows}
    _json.write(record | answers, args.json, console)
    if args.png:
        from fftgrad.commands import _bars  # only here: the rest works without matplotlib

        bars = {
            row.name: {part: 1e3 * time for part, time in row.parts._asdict().items()}
            for row in shown
        }
        title = f"a step, {args.workers} workers, {bits_per_second(link.bandwidth)}"
        wholes = {row.name: 1e3 * row.seconds for row in shown}
        _bars.draw({title: bars}, "ms, predicted", args.png, wholes)
    return 0


def answer(found: Plan, dense: PlanRow) -> str:
    """The plan in a sentence or two."""
    best = found.best
    takes = f"{best.name} takes {quantity(best.seconds, 's')} a step"
    if not found.compress:
        compressed = [row for row in found.rows if row.break_even is not None]
        other = min(compressed, key=_seconds)
        rule = ""
        if other.seconds < best.seconds:
            rule = " It would have to be a tenth faster, at a loss that is not to be checked."
        return (
            f"Do not compress: {takes}; the fastest that compresses, {other.name}, takes "
            f"{quantity(other.seconds, 's')} (loss: {other.loss}).{rule}"
        )
    optimizer = "" if best.momentum else " Use an optimizer without momentum."
    if best.every > 1:
        optimizer = (
            " It goes around your optimizer, and parameters have a row for each worker "
            "(docs/meshes.md, Local steps)."
        )
    return (
        f"{three_digits(best.speed_up)} times the steps of the best dense: {takes} in place of "
        f"{quantity(dense.seconds, 's')} ({dense.name}). Loss: {best.loss}.{optimizer}"
    )


def _seconds(row: PlanRow) -> float:
    return row.seconds


def squares(parameters: int) -> dict[str, jax.ShapeDtypeStruct]:
    """A model of so many parameters: square matrices, and a vector of the rest."""
    side = math.isqrt(parameters // MATRICES)
    like = {f"matrix{i}": jax.ShapeDtypeStruct((side, side), jnp.float32) for i in range(MATRICES)}
    rest = parameters - MATRICES * side**2
    return {
        name: leaf
        for name, leaf in (like | {"vector": jax.ShapeDtypeStruct((rest,), jnp.float32)}).items()
        if leaf.size
    }


def _samples(args: argparse.Namespace) -> list[Any] | None:
    """Gradients of steps and workers, at most so many; None, if there is no file of them."""
    if args.gradients is None:
        return None
    captured = load_gradients(args.gradients)
    trees = [tree for workers in captured.gradients.values() for tree in workers.values()]
    return trees[:SAMPLES]


def _params(args: argparse.Namespace, samples: list[Any] | None) -> Any:
    """The shapes of the parameters, by whatever tells them."""
    if args.params:
        return _files.shapes("plan(--params)", args.params)
    if args.parameters:
        return squares(args.parameters)
    if samples:
        return samples[0]
    raise ValueError(
        "plan(--parameters): must be given, or --params or --gradients, got none of them; use "
        "--parameters 25M."
    )


def _show(rows: Sequence[PlanRow], console: Console) -> None:
    errors = ("error",) if any(row.error is not None for row in rows) else ()
    out = table("exchange", "a step", "times", "codec", "link", *errors, "pays below", "loss")
    for row in rows:
        error = "" if row.error is None else three_digits(row.error)
        out.add_row(
            row.name,
            quantity(row.seconds, "s"),
            three_digits(row.speed_up),
            quantity(row.parts.compress + row.parts.decompress, "s"),
            quantity(row.link_bytes, "B"),
            *(error for _ in errors),
            _below(row.break_even),
            row.loss,
        )
    console.print(out)
    console.print(LEGEND, markup=False, highlight=False)


def _below(break_even: float | None) -> str:
    """A break-even for people; None is that of dense."""
    if break_even is None:
        return ""
    if not break_even:
        return "never"
    return "any link" if math.isinf(break_even) else bits_per_second(break_even)
