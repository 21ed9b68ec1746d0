"""`fftgrad plan`: whether compression pays over a link, and which."""

import argparse
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from fftgrad import advise
from fftgrad.advise import Link, Plan, PlanRow
from fftgrad.advise.commands import _files, _json
from fftgrad.advise.commands._arguments import tells
from fftgrad.advise.commands._plan_arguments import MATRICES
from fftgrad.advise.commands._plan_arguments import add_arguments as add_arguments
from fftgrad.advise.commands._progress import waiting
from fftgrad.advise.commands._text import bits_per_second, quantity, table, three_digits

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
below: over a faster link the best dense wins. loss: what came of it in short
runs of small models with 8 workers, of two stages of signs or of 2 bits and
local steps with 4."""

SAMPLES = 4

TRIFLE = 1e-3
"""The share of a step below which the bytes of a gradient do not matter."""


def run(args: argparse.Namespace, console: Console) -> int:
    """Plans, and prints the table, the answer and the code."""
    link = Link(args.bandwidth, args.latency)
    samples = _samples(args)
    params = _params(args, samples)
    with waiting("timing here") as tell:
        measured = advise.measure(
            params,
            step=args.step,
            workers=args.workers,
            link=link,
            fast=_fast(args),
            axis_name=args.axis_name,
            gradients=samples,
            buckets=args.buckets,
            seconds=args.seconds,
            tell=tell,
        )
    found = advise.plan(
        params,
        **measured._asdict(),
        gradients=samples,
        buckets=args.buckets,
        algorithm=args.algorithm,
    )
    dense = min((row for row in found.rows if row.break_even is None), key=_seconds)
    shown = list(found.rows[: args.top])
    if dense not in shown:
        shown.append(dense)
    if tells(args) and (why := _too_small(found, dense)):
        console.print(f"{why}\n", markup=False, highlight=False)
    elif tells(args):
        _show(shown, console)
        console.print(f"\n{answer(found, dense)}\n", markup=False, highlight=False)
    if tells(args):
        console.print(found.best.code, markup=False, highlight=False, soft_wrap=True)
    record = measured._asdict() | {"link": vars(link), "device": jax.devices()[0].device_kind}
    if measured.fast:
        record["fast"] = {"workers": measured.fast[0], "link": vars(measured.fast[1])}
    rows = [row._asdict() | {"pays_below": _below(row.break_even)} for row in found.rows]
    answers = {"compress": found.compress, "best": found.best.name, "rows": rows}
    _json.write(record | answers, args.json, console)
    if args.png:
        from fftgrad.advise.commands import _bars  # only here: the rest works without matplotlib

        bars = {
            row.name: {part: 1e3 * time for part, time in row.parts._asdict().items()}
            for row in shown
        }
        title = f"a step, {args.workers} workers, {bits_per_second(link.bandwidth)}"
        wholes = {row.name: 1e3 * row.seconds for row in shown}
        _bars.draw({title: bars}, "ms, predicted", args.png, wholes)
    return 0


def _too_small(found: Plan, dense: PlanRow) -> str:
    """Why there is nothing to gain, if the bytes of dense take next to nothing of a step."""
    takes = dense.link_bytes / found.link.bandwidth
    if found.compress or takes > TRIFLE * dense.seconds:
        return ""
    return (
        f"Do not compress: the gradient is too small to matter. Its bytes take "
        f"{quantity(takes, 's')} of a step of {quantity(dense.seconds, 's')} ({dense.name})."
    )


def answer(found: Plan, dense: PlanRow) -> str:
    """The plan in a sentence or two."""
    best = found.best
    takes = f"{best.name} takes {quantity(best.seconds, 's')} a step"
    if not found.compress:
        compressed = [row for row in found.rows if row.break_even is not None]
        other = min(compressed, key=_seconds)
        rule = ""
        if other.seconds < best.seconds:
            rule = (
                " It would have to be a tenth faster to the same loss, and the loss of a class "
                "that is not to be checked."
            )
        return (
            f"Do not compress: {takes}; the fastest that compresses, {other.name}, takes "
            f"{quantity(other.seconds, 's')} (loss: {other.loss}).{rule}"
        )
    steps, optimizer = "", "" if best.momentum else " Use an optimizer without momentum."
    if best.steps != 1:
        steps = (
            f" In runs it took {three_digits(best.steps)} times the steps to dense's loss, which "
            f"leaves {three_digits(best.speed_up / best.steps)} times."
        )
    if best.every > 1:
        optimizer = (
            " It goes around your optimizer, and parameters have a row for each worker "
            "(docs/meshes.md, Local steps)."
        )
    return (
        f"{three_digits(best.speed_up)} times the steps of the best dense: {takes} in place of "
        f"{quantity(dense.seconds, 's')} ({dense.name}). Loss: {best.loss}.{steps}{optimizer}"
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


def _fast(args: argparse.Namespace) -> tuple[int, Link] | None:
    """How many workers fast links join, and their link, if any."""
    if (args.fast is None) != (args.fast_bandwidth is None):
        raise ValueError(
            f"plan(--fast, --fast-bandwidth): must be given together, got {args.fast} and "
            f"{args.fast_bandwidth}; use --fast 8 --fast-bandwidth 50GB/s."
        )
    return args.fast and (args.fast, Link(args.fast_bandwidth, args.fast_latency))


def _samples(args: argparse.Namespace) -> list[Any] | None:
    """Gradients of steps and workers, at most so many; None, if there is no file of them."""
    if args.gradients is None:
        return None
    captured = _files.gradients("plan(--gradients)", args.gradients)
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
