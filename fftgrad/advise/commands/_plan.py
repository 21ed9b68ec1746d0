"""`fftgrad plan`: whether compression pays over a link, and which."""

import argparse
import contextlib
import gc
import math
from collections.abc import Generator, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
from rich.console import Console

from fftgrad import advise
from fftgrad.advise import Link, Plan, PlanRow
from fftgrad.advise._cost import Algorithm
from fftgrad.advise._gradient_files import arrays
from fftgrad.advise.commands._arguments import (
    add_json,
    count,
    in_file,
    is_read_by_people,
    names,
    number,
    png_file,
    seconds,
)
from fftgrad.advise.commands._show import (
    bits_per_second,
    progress,
    quantity,
    table,
    three_digits,
    write_json,
)

HELP = "whether compression pays over your link, which one, and the code for it"
EPILOG = """\
25 million parameters, 16 workers, links of 1 Gbit/s, 300 ms to compute a step:
  fftgrad plan --parameters 25M --workers 16 --bandwidth 1gbit --step 300ms
your own model, and what each method loses of its gradients:
  fftgrad plan --gradients step.npz --workers 16 --bandwidth 1gbit --step 300ms
"""

LEGEND = """\
Order: by seconds to the same loss, first what ends as dense or close and is a
tenth faster than dense, then dense, then all else of those, then the others.
times: the steps that it makes in one step of the best dense. codec: compressing
and decompressing. link: bytes that leave a worker in a step. pays below: over a
faster link the best dense wins. loss: as dense and close are of small models
that no setting was chosen on, with 8 workers; check and worse of others, which
need not travel."""
ALSO = """\
keeps: bytes of its state on a worker. compiles: after how long it could begin,
where it was timed."""
WIDE = 100
"""The columns of a terminal that has room for that."""

MATRICES, SAMPLES = 16, 4

TRIFLE = 1e-3
"""The share of a step below which the bytes of a gradient do not matter."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `plan`."""
    add = parser.add_mutually_exclusive_group().add_argument
    text = f"how many, as 25M: in {MATRICES} square matrices, and a vector of the rest"
    add("--parameters", type=count, metavar="N", help=text)
    text = "the parameters, of which the shapes are read: .npz, .npy, .safetensors"
    add("--params", type=in_file, metavar="FILE", help=text)
    add = parser.add_argument
    text = "those of a step, to measure errors on; without --params also the shapes"
    add("--gradients", type=in_file, metavar="FILE", help=text)
    add("--workers", type=count, required=True, metavar="N", help="how many")
    text = "of the link of a worker: 100mbit, 1gbit, or bytes per second as a number"
    add("--bandwidth", type=number, required=True, metavar="RATE", help=text)
    text = "of a message: 2ms, or seconds as a number (default: 100us)"
    add("--latency", type=number, default="100us", metavar="TIME", help=text)
    text = "what a step takes without any exchange: 300ms, or seconds as a number"
    add("--step", type=number, required=True, metavar="TIME", help=text)
    text = "how many workers fast links join, such as the GPUs of one machine"
    add("--fast", type=count, metavar="N", help=text)
    add("--fast-bandwidth", type=number, metavar="RATE", help="of the fast links: 50GB/s")
    text = "of the fast links (default: 10us)"
    add("--fast-latency", type=number, default="10us", metavar="TIME", help=text)
    text = "of the workers, for the code (default: data; with --fast: slow,fast)"
    add("--axis-name", type=names, metavar="NAME", help=text)
    text = "of the collectives (default: for each the faster of a ring and a tree)"
    add("--algorithm", choices=get_args(Algorithm), default="fastest", help=text)
    add("--buckets", type=count, metavar="N", help="in how many a gradient travels")
    text = "time each codec on this machine, for all of the model: minutes, and its memory"
    add("--measure", action="store_true", help=text)
    text = "how long to time each of them (default: 0.5)"
    add("--seconds", type=seconds, default=0.5, metavar="S", help=text)
    add("--top", type=count, default=10, metavar="N", help="rows to show (default: 10)")
    add_json(parser)
    text = "draw what a step is made of as bars"
    add("--png", type=png_file, metavar="FILE", help=text)


def run(args: argparse.Namespace, console: Console) -> None:
    """Plans, and prints the table, the answer and the code."""
    link, samples = Link(args.bandwidth, args.latency), None
    if args.gradients:
        samples = advise.load_gradients(args.gradients).trees[:SAMPLES]
    params, fast = _params(args, samples), _fast(args)
    rows = _rows(params, args) if args.measure else None
    with progress("timing", rows, aside=True) as tell, _all_kept():
        found = advise.plan(
            params,
            step=args.step,
            workers=args.workers,
            link=link,
            fast=fast,
            axis_name=args.axis_name,
            gradients=samples,
            buckets=args.buckets,
            algorithm=args.algorithm,
            measure=args.measure,
            seconds=args.seconds,
            tell=lambda name: tell(name=name),
        )
    shown = list(found.rows[: args.top])
    if found.dense not in shown:
        shown.append(found.dense)
    if is_read_by_people(args):
        why = _too_small(found)
        if not why:
            _show(shown, found.source, console)
            console.print()
        console.print(f"{why or answer(found)}\n", markup=False, highlight=False)
        console.print(found.best.code, markup=False, highlight=False, soft_wrap=True)
    write_json(_record(found), args.json, console)
    if args.png:
        from fftgrad.advise.commands import _draw  # only here: the rest works without matplotlib

        times = {row.name: row.parts._asdict() for row in shown}
        bars = {name: {part: 1e3 * t for part, t in own.items()} for name, own in times.items()}
        title = f"a step, {args.workers} workers, {bits_per_second(link.bandwidth)}"
        wholes = {row.name: 1e3 * row.seconds for row in shown}
        _draw.bars({title: bars}, "ms, predicted", args.png, wholes)


def _rows(params: Any, args: argparse.Namespace) -> int:
    """How many there are to time."""
    joined = args.fast or 1
    return len(advise.candidates(params, args.workers // joined, joined))


@contextlib.contextmanager
def _all_kept() -> Generator[None]:
    """Without the collector of garbage, which takes a quarter of the time to trace."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _record(found: Plan) -> dict[str, Any]:
    """All that is known of a plan, for programs."""
    measured = found.measured._asdict() | {"link": vars(found.link)}
    if found.measured.fast:
        workers, link = found.measured.fast
        measured["fast"] = {"workers": workers, "link": vars(link)}
    return measured | {
        "source": found.source,
        "device": jax.devices()[0].device_kind,
        "compress": found.compress,
        "best": found.best.name,
        "rows": [row._asdict() | {"pays_below": _below(row.break_even)} for row in found.rows],
    }


def _too_small(found: Plan) -> str:
    """Why there is nothing to gain, if the bytes of dense take next to nothing of a step."""
    dense = found.dense
    takes = dense.link_bytes / found.link.bandwidth
    if found.compress or takes > TRIFLE * dense.seconds:
        return ""
    return (
        f"Do not compress: the gradient is too small to matter. Its bytes take "
        f"{quantity(takes, 's')} of a step of {quantity(dense.seconds, 's')} ({dense.name})."
    )


def answer(found: Plan) -> str:
    """The plan in a sentence or two."""
    best, dense = found.best, found.dense
    takes = f"{best.name} takes {quantity(best.seconds, 's')} a step"
    if not found.compress:
        other = min((row for row in found.rows if not row.is_dense), key=lambda row: row.seconds)
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
    place = f" It goes {best.place}." if best.place else ""
    if best.every > 1:
        place += " See docs/meshes.md, Local steps."
    steps = ""
    if best.steps != 1:
        steps = (
            f" In runs it took {three_digits(best.steps)} times the steps to dense's loss, which "
            f"leaves {three_digits(best.speed_up / best.steps)} times."
        )
    return (
        f"{three_digits(best.speed_up)} times the steps of the best dense: {takes} in place of "
        f"{quantity(dense.seconds, 's')} ({dense.name}). Loss: {best.loss}.{steps}{place}"
    )


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


def _params(args: argparse.Namespace, samples: list[Any] | None) -> Any:
    """The shapes of the parameters, by whatever tells them."""
    if args.parameters:
        return squares(args.parameters)
    if args.params:
        return {name: _like(x) for name, x in arrays(args.params)}
    if samples:
        return jax.tree.map(_like, samples[0])
    raise ValueError(
        "plan(--parameters): must be given, or --params or --gradients, got none of them; use "
        "--parameters 25M."
    )


def _like(x: Any) -> jax.ShapeDtypeStruct:
    """In float32 what no gradient is, such as float64."""
    narrow = x.dtype in (jnp.bfloat16, jnp.float16)
    return jax.ShapeDtypeStruct(x.shape, x.dtype if narrow else jnp.float32)


def _show(rows: Sequence[PlanRow], source: str, console: Console) -> None:
    wide = console.width >= WIDE
    also = ("keeps", "compiles") if wide else ()
    errors = ("error",) if any(row.error is not None for row in rows) else ()
    numbers = "a step", "times", "codec", "link", *also, *errors, "pays below", "loss"
    out = table("exchange", *numbers)
    for row in rows:
        compiles = quantity(row.compile, "s") if row.compile else ""
        error = "" if row.error is None else three_digits(row.error)
        out.add_row(
            row.name,
            quantity(row.seconds, "s"),
            three_digits(row.speed_up),
            quantity(row.parts.compress + row.parts.decompress, "s"),
            quantity(row.link_bytes, "B"),
            *((quantity(row.memory, "B"), compiles) if wide else ()),
            *(error for _ in errors),
            _below(row.break_even),
            row.loss,
        )
    console.print(out)
    for text in (LEGEND, *([ALSO] if wide else []), source):
        console.print(text, markup=False, highlight=False)


def _below(break_even: float | None) -> str:
    """A break-even for people; None is that of dense."""
    if break_even is None:
        return ""
    if not break_even:
        return "never"
    return "any link" if math.isinf(break_even) else bits_per_second(break_even)
