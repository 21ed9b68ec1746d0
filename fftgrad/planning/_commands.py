"""The command line: `fftgrad plan`, `analyze`, `bench` and `islands status`."""

import argparse
import functools
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, get_args

import fftgrad as fg
from fftgrad import planning
from fftgrad.planning import Link, Plan, _bench, _devices, _gradients, _models, _plan
from fftgrad.planning._plan import below
from fftgrad.planning._predict import Algorithm
from fftgrad.planning._text import parse_count, quantity, table, three_digits

DESCRIPTION = """\
Compressed gradient exchange: predict whether it pays, choose a method, analyze
gradients, and time the codecs on this machine.
"""
EXIT_CODES = """\
exit codes:
  0    done, whatever the answer is
  1    the run failed
  2    a wrong argument or file, named in one line on stderr
"""
RULE = re.compile(r"[\w.]+\(.*?\): ")
"""How an error of the library about an argument begins."""

PLAN = """\
a Llama of 1.3 billion parameters on 16 H100s that are joined by 1 Gbit/s:
  fftgrad plan --model llama:1.3B --workers 16 --bandwidth 1gbit \\
    --step 1s --device h100
the shapes of your own model, with codec times of this machine:
  fftgrad plan --params params.npz --workers 16 --bandwidth 1gbit \\
    --step 300ms --measure
"""
LEGEND = """\
a step   seconds, with the codec, Muon and the link
steps    to dense's loss, in units of dense's steps: measured, or assumed
         for the class of the loss (close 1.2, check 1.5, worse 2)
to loss  seconds to the loss that dense reaches in a step; rows are ranked by it
Muon     its matrix products, if the row has Muon in place of your optimizer
link     bytes that leave a worker in a step
why not  "loss": the final loss of small models was not close to dense's, or was
         close only on tasks that were used to choose settings, or was measured with
         less than half of this compression"""


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_mutually_exclusive_group(required=True).add_argument
    model("--model", metavar="NAME", help=f"a transformer: {', '.join(_models.MODELS)}")
    model("--layers", type=int, metavar="N", help="layers of a Llama, with --width")
    model("--parameters", metavar="N", help="size of a transformer, such as 25M")
    model("--params", metavar="F", help="an .npz file of parameters, to read shapes")
    add = parser.add_argument
    add("--width", type=int, metavar="N", help="width of the model of --layers")
    text = "vocabulary of the model of --layers (default: 32000)"
    add("--vocab", type=int, default=_models.VOCABULARY, metavar="N", help=text)
    text = (
        f"the device that will train: this, {', '.join(_devices.KNOWN)}, or a file that `fftgrad "
        "bench` wrote on one like it (default: this, which is measured once)"
    )
    add("--device", default="this", metavar="NAME", help=text)
    add("--workers", type=int, required=True, metavar="N", help="number of workers")
    text = "bandwidth of a worker's link, or of its share of one: 100mbit, 1Gbit/s, 125MB/s"
    add("--bandwidth", required=True, metavar="RATE", help=text)
    add("--latency", default="100us", metavar="TIME", help="latency of a message (default: 100us)")
    text = "time of a step without any exchange: 300ms, 1.5s"
    add("--step", required=True, metavar="TIME", help=text)
    text = "number of workers that fast links join, such as the GPUs of one machine"
    add("--fast", type=int, metavar="N", help=text)
    text = "bandwidth of the fast links (default: 50GB/s)"
    add("--fast-bandwidth", default="50GB/s", metavar="RATE", help=text)
    text = "latency of the fast links (default: 10us)"
    add("--fast-latency", default="10us", metavar="TIME", help=text)
    text = "algorithm of the collectives (default: for each the faster of ring and tree)"
    add("--algorithm", choices=get_args(Algorithm), default="fastest", help=text)
    text = "time each codec on this machine; needs minutes, and the memory of the model"
    add("--measure", action="store_true", help=text)
    add("--png", metavar="FILE", help="draw the parts of each row's time to FILE")


def run_plan(args: argparse.Namespace) -> None:
    """Print the table of a plan, its answer, and the code of the recommended row."""
    fast = args.fast and (args.fast, Link(args.fast_bandwidth, args.fast_latency))
    found = planning.plan(
        _shapes(args),
        step=args.step,
        workers=args.workers,
        link=Link(args.bandwidth, args.latency),
        fast=fast,
        algorithm=args.algorithm,
        device=args.device,
        measure=args.measure,
        tell=lambda name: print(f"timing {name}", file=sys.stderr),
    )
    print(f"{found}\n{LEGEND}\n\n{textwrap.fill(answer(found), 80)}\n\n{found.best.code}")
    if args.png:
        _plan.draw(found, args.png)


def _shapes(args: argparse.Namespace) -> Any:
    """The shapes of the model that is asked about."""
    if (args.width is None) != (args.layers is None):
        found = f"--layers {args.layers} and --width {args.width}"
        raise ValueError(f"plan(--width): must be given with --layers, got {found}; use both.")
    if args.model:
        return _models.model(args.model)
    if args.parameters:
        return _models.of_size(parse_count("plan(--parameters)", args.parameters))
    if args.params:
        return planning.load_gradients(args.params).trees[0]
    return _models.transformer(args.layers, args.width, args.vocab)


def answer(found: Plan) -> str:
    """The plan in a sentence or two."""
    best, dense = found.best, found.dense
    if not found.compress:
        other = next(row for row in found.rows if not row.is_dense)
        return (
            f"Do not compress: {best.name} takes {quantity(best.seconds, 's')} a step. The fastest "
            f"compressed row to dense's loss, {other.name}, is predicted to take "
            f"{quantity(other.to_loss, 's')} ({other.why_not})."
        )
    place = f" It goes {best.place}." if best.place else ""
    return (
        f"{best.name} reaches dense's loss {three_digits(dense.to_loss / best.to_loss)} times "
        f"sooner than {dense.name}: in {quantity(best.to_loss, 's')} instead of "
        f"{quantity(dense.to_loss, 's')} for each dense step. Its step is faster up to "
        f"{below(best.break_even or 0.0)}. Loss: {best.loss}.{place}"
    )


ANALYZE = """\
gradients of a run, saved by fg.planning.save_gradients:
  fftgrad analyze gradients.npz
gradients of two processes, with a figure:
  fftgrad analyze process0.npz process1.npz --png out.png
"""


def _analyze_arguments(parser: argparse.ArgumentParser) -> None:
    text = "files of save_gradients, one for each process, or an .npz file of one tree of arrays"
    parser.add_argument("gradients", nargs="+", help=text)
    parser.add_argument("--png", metavar="FILE", help="draw the errors of bases and codecs to FILE")


def run_analyze(args: argparse.Namespace) -> None:
    """Print what gradients look like, and draw it."""
    found = planning.analyze(planning.load_gradients(*args.gradients))
    print(_gradients.show(found))
    if args.png:
        _gradients.draw(found, args.png)


BENCH = """\
time the codecs, and write a file of this device for fftgrad plan --device:
  fftgrad bench
  fftgrad bench --sizes 4Mi
"""


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    text = "lengths of the random, heavy-tailed vectors (default: 1Mi,16Mi)"
    parser.add_argument("--sizes", default="1Mi,16Mi", metavar="N,N", help=text)
    text = "seconds for each length, without compilation (default: 10)"
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help=text)


def run_bench(args: argparse.Namespace) -> None:
    """Print the machine, and the times of codecs for each size. Write its figures for plans."""
    sizes = [parse_count("bench(--sizes)", text) for text in args.sizes.split(",")]
    print(_bench.machine(), flush=True)
    _devices.measure()
    print(f"file      {_devices.kept()}, for fftgrad plan --device", flush=True)
    for n in sizes:
        copy, rows = _bench.time_codecs(n, _bench.CODECS, args.seconds)
        print(_bench.show(n, copy, rows), flush=True)


ISLANDS = """\
show every ten seconds which islands counted in the last rounds:
  watch -n 10 fftgrad islands status s3://bucket/run
"""
ROUNDS = 8
"""The table has so many of the last rounds."""


def _islands_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["status"], help="show the last rounds")
    parser.add_argument("url", help="URL of the store: s3://, gs://, az://, or a folder")


def run_islands(args: argparse.Namespace) -> None:
    """Print the state of a run of islands."""
    print(show_islands(fg.islands.status(args.url)))


def show_islands(found: fg.islands.Status) -> str:
    """The last rounds, and the open one."""
    rounds: list[tuple[str, ...]] = []
    for one in found.rounds[-ROUNDS:]:
        missed = [f"{name} did not come" for name in one.missed]
        others = "; ".join(missed + [f"{name}: {why}" for name, why in one.refused.items()])
        loss = "" if one.loss is None else f"{one.loss:.4f}"
        cells = str(one.round), f"{len(one.counted)}", loss, quantity(one.waited, "s")
        rounds.append((*cells, _plain(others)))
    came = _plain(", ".join(found.came)) or "nobody yet"
    open_round = f"open: round {found.open}, came: {came}; newest anchor: round {found.anchor}"
    head = ("round", "counted", "loss", "waited", "not counted")
    return f"{table(head, rounds, (0, 4))}\n{open_round}"


def _plain(text: str) -> str:
    """Replace characters that would move the cursor."""
    return "".join(mark if mark.isprintable() else "?" for mark in text)


COMMANDS: dict[str, tuple[str, str, Callable[..., None], Callable[..., None]]] = {
    "plan": (
        "predict whether compression pays over your link; print the code to paste",
        PLAN, _plan_arguments, run_plan,
    ),
    "analyze": (
        "analyze saved gradients and recommend a codec",
        ANALYZE, _analyze_arguments, run_analyze,
    ),
    "bench": ("time the codecs on this machine", BENCH, _bench_arguments, run_bench),
    "islands": (
        "show the last rounds of a run of islands",
        ISLANDS, _islands_arguments, run_islands,
    ),
}  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    formatter = functools.partial(argparse.RawDescriptionHelpFormatter, width=79)
    examples = "\n".join(examples for _, examples, *_ in COMMANDS.values())
    parser = argparse.ArgumentParser(
        prog="fftgrad",
        description=DESCRIPTION,
        epilog=f"{examples}\n{EXIT_CODES}",
        formatter_class=formatter,
    )
    version = f"fftgrad {_bench.version('fftgrad')}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (about, examples, add_arguments, run) in COMMANDS.items():
        own = commands.add_parser(
            name,
            help=about,
            description=about,
            epilog=f"{examples}\n{EXIT_CODES}",
            formatter_class=formatter,
        )
        add_arguments(own)
        own.set_defaults(run=run)
    return parser


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Bad usage and --help leave by SystemExit."""
    args = make_parser().parse_args(argv)
    try:
        args.run(args)
    except (OSError, TypeError, ValueError) as error:
        if not isinstance(error, OSError) and not RULE.match(str(error)):
            raise
        print(f"fftgrad: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0
