"""`fftgrad plan`: whether compression pays over a link, and which."""

import argparse
import contextlib
import gc
import math
import pathlib
import re
import textwrap
from collections.abc import Generator, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
from rich.console import Console

from fftgrad import _axes, planning
from fftgrad.planning import Link, Plan, PlanRow
from fftgrad.planning._exchange import groups
from fftgrad.planning._gradients import arrays
from fftgrad.planning._link import Algorithm, Parts
from fftgrad.planning._plan import ACCEPTED, MARGIN
from fftgrad.planning.commands._text import (
    add_json,
    bits_per_second,
    count,
    in_file,
    is_read_by_people,
    names,
    paragraph,
    png_file,
    progress,
    quantity,
    rate,
    seconds,
    table,
    three_digits,
    time,
    whole,
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
COLORS = "#1672d3", "#a47f0f", "#239967", "#8c147e"
"""Any two differ for usual eyes and for those that see no red or no green."""

BEST = ""
"""What `--program` is without a name."""


LEGEND = """\
Order: by seconds to the same loss, first what ends as dense or close and is a tenth faster than
dense, then dense, then all else of those, then the others. times: the steps that it makes in one
step of the best dense. codec: compressing and decompressing, and the optimizer of a row that has
its own. link: bytes that leave a worker in a step. pays below: over a faster link the best dense
wins. loss: as dense and close are of small models that no setting was chosen on, with 8 workers;
check and worse of others, which need not travel."""
ALSO = """\
keeps: bytes of its state on a worker. compiles: after how long it could begin, where it was
timed."""
WIDE = 100
"""The columns of a terminal that has room for that."""

TRIFLE = 1e-3
"""The share of a step below which the bytes of a gradient do not matter."""


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
        samples = planning.load_gradients(args.gradients).trees[:SAMPLES]
    params, fast = _params(args, samples), _fast(args)
    groups("plan", args.workers, fast, args.axis_name)  # refuses what makes no rows
    _check_program(params, args)
    rows = len(_rows(params, args)) if args.measure else None
    with progress("timing", rows) as tell, _all_kept():
        found = planning.plan(
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
        draw(shown, f"a step, {args.workers} workers, {bits_per_second(link.bandwidth)}", args.png)


def draw(rows: Sequence[PlanRow], title: str, path: pathlib.Path) -> None:
    """Draw the parts of a step as bars; a mark is the whole, below which some parts overlap."""
    from matplotlib.figure import Figure  # only here: the rest works without matplotlib

    figure = Figure(figsize=(6, 1.5 + 0.32 * len(rows)), layout="constrained")
    axes, names, start = figure.subplots(), [row.name for row in rows], [0.0] * len(rows)
    for part, color in zip(Parts._fields, COLORS, strict=True):
        width = [1e3 * getattr(row.parts, part) for row in rows]
        axes.barh(names, width, left=start, label=part, color=color)
        start = [one + more for one, more in zip(start, width, strict=True)]
    axes.plot([1e3 * row.seconds for row in rows], names, "k|", markersize=12, label="whole")
    axes.invert_yaxis()
    axes.set(title=title, xlabel="ms, predicted")
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=5)
    figure.savefig(path, dpi=150, format="png")


def _rows(params: Any, args: argparse.Namespace) -> Sequence[planning.Candidate]:
    """Those that are compared."""
    joined = args.fast or 1
    return planning.candidates(params, args.workers // joined, joined)


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
    best = found.best
    if not found.compress:
        takes = f"{best.name} takes {quantity(best.seconds, 's')} a step"
        other = min((row for row in found.rows if not row.is_dense), key=lambda row: row.seconds)
        rule = ""
        if other.seconds < best.seconds:
            rule = (
                " To be recommended it would have to be a tenth faster to the same loss, and "
                "to have ended at a loss like dense's in runs on other tasks."
            )
        by_codecs = _by_codecs(found)
        here = f", if this {jax.default_backend().upper()} is what trains" if by_codecs else ""
        return (
            f"Do not compress{here}: {takes}; the fastest that compresses, {other.name}, takes "
            f"{quantity(other.seconds, 's')} (loss: {other.loss}).{rule}{by_codecs}"
        )
    return beside(best, found.dense)


def _by_codecs(found: Plan) -> str:
    """Which row would be recommended but for what its codec takes, and that may be quicker."""

    def codec(row: PlanRow) -> float:
        return row.parts.compress + row.parts.decompress

    def by_link(row: PlanRow) -> float:
        return row.to_loss * (1 - codec(row) / row.seconds)

    close = [row for row in found.rows if not row.is_dense and row.loss in ACCEPTED]
    least = min((by_link(row) for row in found.rows if row.is_dense), default=0.0)
    if not close or by_link(quick := min(close, key=by_link)) * (1 + MARGIN) >= least:
        return ""
    return (
        f" Codec times decide that: of the {quantity(quick.seconds, 's')} of {quick.name} its "
        f"codec and optimizer take {quantity(codec(quick), 's')} here. If another kind of device "
        "will train, run this there."
    )


def beside(row: PlanRow, dense: PlanRow) -> str:
    """A row beside the best dense one."""
    place = f" It goes {row.place}." if row.place else ""
    steps = ""
    if row.steps != 1:
        steps = (
            f" In runs it took {three_digits(row.steps)} times the steps to dense's loss, which "
            f"leaves {three_digits(row.speed_up / row.steps)} times."
        )
    return (
        f"{three_digits(row.speed_up)} times the steps of the best dense: {row.name} takes "
        f"{quantity(row.seconds, 's')} a step in place of {quantity(dense.seconds, 's')} "
        f"({dense.name}). Loss: {row.loss}.{steps}{place}"
    )


def show(found: Plan, rows: Sequence[PlanRow], console: Console) -> None:
    """The table of some rows, the answer, and the code of the best row."""
    why = _too_small(found)
    if not why:
        _table(rows, console)
        paragraph(found.source, console)
        console.print()
    how = " --program prints how." if found.best.every > 1 else ""
    paragraph(why or f"{answer(found)}{how}", console)
    console.print(f"\n{found.best.code}", markup=False, highlight=False, soft_wrap=True)


def _table(rows: Sequence[PlanRow], console: Console) -> None:
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
            below(row.break_even),
            row.loss,
        )
    console.print(out)
    paragraph(f"{LEGEND} {ALSO}" if wide else LEGEND, console)


def below(break_even: float | None) -> str:
    """A break-even for people; None is that of dense."""
    if break_even is None:
        return ""
    if not break_even:
        return "never"
    return "any link" if math.isinf(break_even) else bits_per_second(break_even)


HEAD = '''\
"""{about}

Put your own model, data and learning rate in their places. With simulated workers on a CPU:
JAX_NUM_CPU_DEVICES={workers} PJRT_NPROC={threads} python THIS_FILE
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import {shardings}

import fftgrad as fg

mesh = jax.make_mesh({sizes}, {names}, axis_types=(AxisType.Auto,) * {axes})
{yours}tx = {tx}
x, w = jax.random.normal(jax.random.key(0), ({rows}, 100)), jnp.zeros((100, 100))
y = jnp.tanh(x @ jax.random.normal(jax.random.key(1), (100, 100)) / 10)


def loss(w, x, y):
    return jnp.mean((jnp.tanh(x @ w) - y) ** 2)


'''
USUAL = """\
def step(w, state, x, y):  # of one worker, on its rows of x and y
    _, grad = fg.value_and_grad(loss, {axis})(w, x, y)
    updates, state = tx.update(grad, state, w)
    return optax.apply_updates(w, updates), state


state = fg.init_state(tx, w, mesh, {axis})
train = fg.data_parallel(step, mesh, {axis})  # of all workers
before = loss(w, x, y)
for _ in range(100):
    w, state = train(w, state, x, y)
print(before, "->", loss(w, x, y))
"""
LOCAL = """\
def step(rows, state, x, y):  # of one worker, which trains parameters of its own: its row
    own = rows[0]
    updates, state = tx.update(jax.grad(loss)(own, x, y), state, own)
    return optax.apply_updates(own, updates)[None], state


state = fg.init_state(tx, w, mesh, {axis})
specs, row = fg.state_specs(state, {axis}), P({axis})
train = jax.jit(
    jax.shard_map(step, mesh=mesh, in_specs=(row, specs, row, row), out_specs=(row, specs))
)
rows = jax.device_put(jnp.broadcast_to(w, ({workers}, *w.shape)), NamedSharding(mesh, row))
for _ in range(100):
    rows, state = train(rows, state, x, y)
print(loss(w, x, y), "->", loss(state.anchor, x, y))  # of what the workers have in common
"""
YOURS = {"learning_rate": "0.02", "optimizer": "optax.adam(0.02)"}
"""What a row leaves to the user, as it trains this model."""


def program(found: Plan, row: PlanRow, about: str) -> str:
    """The source; `about` is what the plan says of the row."""
    own, local = found.measured, row.every > 1
    joined = groups("plan", own.workers, own.fast, own.axis_name)
    names = _axes.names(joined.axis_name)
    sizes = joined.sizes + (1,) * (len(names) - len(joined.sizes))
    yours = [
        f"{name} = {made}  # find yours\n"
        for name, made in YOURS.items()
        if re.search(rf"\b{name}\b", row.code)
    ]
    chained = f"optax.chain(\n    {row.code},\n    optax.sgd(0.3),\n)"
    return (HEAD + (LOCAL if local else USUAL)).format(
        about="\n".join(textwrap.wrap(about, 96, break_on_hyphens=False)),
        workers=own.workers,
        threads=4 * own.workers,
        shardings="AxisType, NamedSharding, PartitionSpec as P" if local else "AxisType",
        sizes=sizes,
        names=names,
        axes=len(names),
        yours="".join(yours),
        tx=row.code if local or row.whole else chained,
        rows=16 * own.workers,
        axis=repr(joined.axis_name),
    )
