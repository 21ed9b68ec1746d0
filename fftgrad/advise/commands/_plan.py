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
from fftgrad.advise import Link, Plan
from fftgrad.advise._cost import Algorithm
from fftgrad.advise._gradients import arrays
from fftgrad.advise._inputs import groups
from fftgrad.advise.commands._answer import answer, below, beside, show
from fftgrad.advise.commands._arguments import (
    add_json,
    count,
    in_file,
    is_read_by_people,
    names,
    png_file,
    rate,
    seconds,
    time,
    whole,
)
from fftgrad.advise.commands._program import program
from fftgrad.advise.commands._show import (
    bits_per_second,
    progress,
    write_json,
)

HELP = "whether compression pays over your link, which one, and the code for it"
EPILOG = """\
25 million parameters, 16 workers, links of 1 Gbit/s, 300 ms to compute a step:
  fftgrad plan --parameters 25M --workers 16 --bandwidth 1gbit --step 300ms
your own model, and what each method loses of its gradients:
  fftgrad plan --gradients step.npz --workers 16 --bandwidth 1gbit --step 300ms
a program to begin with, of the best row:
  fftgrad plan --parameters 25M --workers 16 --bandwidth 1gbit --step 300ms \\
    --program
"""

MATRICES, SAMPLES = 16, 4

BEST = ""
"""What `--program` is without a name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `plan`."""
    add = parser.add_mutually_exclusive_group().add_argument
    text = f"how many, as 25M: in {MATRICES} square matrices, and a vector of the rest"
    add("--parameters", type=count, metavar="N", help=text)
    text = "the parameters, of which the shapes are read: .npz"
    add("--params", type=in_file, metavar="FILE", help=text)
    add = parser.add_argument
    text = "those of a step, to measure errors on; without --params also the shapes"
    add("--gradients", type=in_file, metavar="FILE", help=text)
    add("--workers", type=whole(2, 32_767), required=True, metavar="N", help="how many")
    text = "of the link of a worker, its share of one that several have: 100mbit, 1Gbit/s, 125MB/s"
    add("--bandwidth", type=rate, required=True, metavar="RATE", help=text)
    text = "of a message: 2ms, 50us (default: 100us)"
    add("--latency", type=time, default="100us", metavar="TIME", help=text)
    text = "what a step takes without any exchange: 300ms, 1.5s"
    add("--step", type=time, required=True, metavar="TIME", help=text)
    text = "how many workers fast links join, such as the GPUs of one machine"
    add("--fast", type=whole(2), metavar="N", help=text)
    add("--fast-bandwidth", type=rate, metavar="RATE", help="of the fast links: 50GB/s")
    text = "of the fast links (default: 10us)"
    add("--fast-latency", type=time, default="10us", metavar="TIME", help=text)
    text = "of the workers, for the code (default: data; with --fast: slow,fast)"
    add("--axis-name", type=names, metavar="NAME", help=text)
    text = "of the collectives (default: for each the faster of a ring and a tree)"
    add("--algorithm", choices=get_args(Algorithm), default="fastest", help=text)
    add("--buckets", type=whole(1, 100), metavar="N", help="in how many a gradient travels")
    text = "time each codec on this machine, for all of the model: minutes, and its memory"
    add("--measure", action="store_true", help=text)
    text = "how long to time each of them (default: 0.5)"
    add("--seconds", type=seconds, default=0.5, metavar="S", help=text)
    add("--top", type=whole(1), default=10, metavar="N", help="rows to show (default: 10)")
    text = "print a whole program in place of the table: of the best row, or of that of this name"
    add("--program", nargs="?", const=BEST, metavar="ROW", help=text)
    add_json(parser)
    text = "draw what a step is made of as bars"
    add("--png", type=png_file, metavar="FILE", help=text)


def run(args: argparse.Namespace, console: Console) -> None:
    """Plans, and prints the table, the answer and the code."""
    link, samples = Link(args.bandwidth, args.latency), None
    if args.gradients:
        samples = advise.load_gradients(args.gradients).trees[:SAMPLES]
    params, fast = _params(args, samples), _fast(args)
    groups("plan", args.workers, fast, args.axis_name)  # refuses what makes no rows
    _check_program(params, args)
    rows = len(_rows(params, args)) if args.measure else None
    with progress("timing", rows, aside=0.0) as tell, _all_kept():
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
    if args.program is not None:
        row = next((row for row in found.rows if row.name == args.program), found.best)
        about = answer(found) if row == found.best else beside(row, found.dense)
        console.out(program(found, row, about), highlight=False, end="")
    elif is_read_by_people(args):
        show(found, shown, console)
    write_json(_record(found), args.json, console)
    if args.png:
        from fftgrad.advise.commands import _draw  # only here: the rest works without matplotlib

        times = {row.name: row.parts._asdict() for row in shown}
        bars = {name: {part: 1e3 * t for part, t in own.items()} for name, own in times.items()}
        title = f"a step, {args.workers} workers, {bits_per_second(link.bandwidth)}"
        wholes = {row.name: 1e3 * row.seconds for row in shown}
        _draw.bars({title: bars}, "ms, predicted", args.png, wholes)


def _rows(params: Any, args: argparse.Namespace) -> Sequence[advise.Candidate]:
    """Those that are compared."""
    joined = args.fast or 1
    return advise.candidates(params, args.workers // joined, joined)


def _check_program(params: Any, args: argparse.Namespace) -> None:
    """Refuses a program of no row, before anything is timed."""
    if args.program is None:
        return
    if not is_read_by_people(args):
        raise ValueError(
            "plan(--program): must have standard output for itself, got --json - too; use --json "
            "FILE."
        )
    known = [row.name for row in _rows(params, args)]
    if args.program not in (BEST, *known):
        raise ValueError(
            f"plan(--program): must be the name of a row, got {args.program!r}; use one of "
            f"{', '.join(map(repr, known))}{'' if args.fast is None else ', or leave out --fast'}."
        )


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
        "rows": [row._asdict() | {"pays_below": below(row.break_even)} for row in found.rows],
    }


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
        return {name: _like(x) for name, x in arrays(args.params).items()}
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
