"""The command line: `fftgrad plan`, `analyze`, `bench` and `islands status`."""

import argparse
import functools
import re
import sys
import textwrap
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

import fftgrad as fg
from fftgrad import planning
from fftgrad._contracts import PyTree
from fftgrad._values import check, check_count
from fftgrad.planning import Link, Plan, _devices, _gradients
from fftgrad.planning._text import quantity, table, three_digits
from fftgrad.planning._timing import heavy_tailed, timed

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
"""Start of an fftgrad error about an argument."""

PLAN = """\
a Llama of 1.3 billion parameters on 16 H100s that are joined by 1 Gbit/s:
  fftgrad plan --model llama:1.3B --workers 16 --bandwidth 1gbit \\
    --step 1s --device h100
the shapes of your own model, with codec times of this machine:
  fftgrad plan --params params.npz --workers 16 --bandwidth 1gbit \\
    --step 300ms --measure
"""
LEGEND = """\
a step   seconds, with the codec, Muon and what buckets do not hide of the link
steps    to dense's loss, in units of dense's steps: measured, or assumed
         for the class of the loss (close 1.2, check 1.5)
to loss  seconds to the loss that dense reaches in a step; rows are ranked by it
Muon     its matrix products, if the row has Muon in place of your optimizer
link     bytes that leave a worker in a step
why not  "loss": the final loss of small models was not close to dense's, or was
         close only on tasks that were used to choose settings, or was measured with
         less than half of this compression"""


Run = Callable[[argparse.Namespace], None]


def plan_command(parser: argparse.ArgumentParser) -> Run:
    model = parser.add_mutually_exclusive_group(required=True).add_argument
    model("--model", metavar="NAME", choices=MODELS, help=f"a Llama: {', '.join(MODELS)}")
    model("--layers", type=int, metavar="N", help="layers of a Llama, with --width")
    model("--params", metavar="F", help="an .npz file of parameters, to read shapes")
    add = parser.add_argument
    add("--width", type=int, metavar="N", help="width of the model of --layers")
    text = "vocabulary of the model of --layers (default: 32000)"
    add("--vocab", type=int, default=VOCABULARY, metavar="N", help=text)
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
    text = "time each codec on this machine; needs minutes, and the memory of the model"
    add("--measure", action="store_true", help=text)
    return run_plan


def run_plan(args: argparse.Namespace) -> None:
    """Print the table of a plan, its answer, and the code of the recommended row."""
    both, given = (args.width is None) == (args.layers is None), f"{args.layers} and {args.width}"
    check(both, "plan(--layers, --width)", "be given together", given, "use both, and no --model.")
    if args.params:
        params = planning.load_gradients(args.params).trees[0]
    else:
        params = model(*MODELS.get(args.model, (args.layers, args.width)), args.vocab)
    found = planning.plan(
        params,
        step=args.step,
        workers=args.workers,
        link=Link(args.bandwidth, args.latency),
        fast=args.fast and (args.fast, Link(args.fast_bandwidth, "10us")),
        device=args.device,
        measure=args.measure,
        tell=lambda name: print(f"timing {name}", file=sys.stderr),
    )
    print(f"{found}\n{LEGEND}\n\n{textwrap.fill(answer(found), 80)}\n\n{found.best.code}")


MODELS = {
    "llama:134M": (12, 768),
    "llama:350M": (24, 1024),
    "llama:1.3B": (24, 2048),
    "llama:7B": (32, 4096),
}
"""Layers and width, of GaLore (arXiv:2403.03507, table 5) and Touvron et al. (arXiv:2302.13971)."""
VOCABULARY = 32_000


def model(layers: int, width: int, vocabulary: int = VOCABULARY) -> PyTree:
    """Return the shapes of a Llama: about 12 width^2 values per layer, embedding and head."""
    check_count("plan(--layers)", layers, "use --layers 24.")
    check_count("plan(--width)", width, "use --width 2048.")
    check_count("plan(--vocab)", vocabulary, "use --vocab 32000.")
    hidden, around = 8 * width // 3, {"attention_norm": (width,), "mlp_norm": (width,)}
    layer = dict.fromkeys(("query", "key", "value", "out"), (width, width)) | around
    layer |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    embeddings = {"embed": (vocabulary, width), "lm_head": (width, vocabulary)}
    shapes = {**embeddings, "layers": [layer] * layers, "norm": (width,)}
    is_shape = lambda node: isinstance(node, tuple)  # noqa: E731
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=is_shape)


def answer(found: Plan) -> str:
    """Summarize the plan in one or two sentences."""
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
        f"{quantity(dense.to_loss, 's')} for each dense step. Loss: {best.loss}.{place}"
    )


ANALYZE = """\
gradients of a run, saved by fg.planning.save_gradients:
  fftgrad analyze gradients.npz
gradients of two processes:
  fftgrad analyze process0.npz process1.npz
"""


def analyze_command(parser: argparse.ArgumentParser) -> Run:
    text = "files of save_gradients, one for each process, or an .npz file of one tree of arrays"
    parser.add_argument("gradients", nargs="+", help=text)
    analyze = lambda files: planning.analyze(planning.load_gradients(*files))  # noqa: E731
    return lambda args: print(_gradients.show(analyze(args.gradients)))


BENCH = """\
time the codecs, and write a file of this device for fftgrad plan --device:
  fftgrad bench
  fftgrad bench --sizes 4000000
"""
SIZES = (1 << 20, 1 << 24)


def bench_command(parser: argparse.ArgumentParser) -> Run:
    text = "lengths of the random, heavy-tailed vectors (default: 2^20 and 2^24)"
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="N", help=text)
    text = "seconds for each length, without compilation (default: 10)"
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help=text)
    return run_bench


CODECS: dict[str, fg.codecs.Codec] = {
    "bfloat16": fg.Cast("bfloat16"),
    "8 bits": fg.RangeFloat(bits=8),
    "QSGD, 4 bits": fg.UniformQuantizer(bits=4),
    "ternary": fg.codecs.Ternary(),
    "sign": fg.Sign(),
    "EDEN, 2 bits": fg.chain(fg.Hadamard(), fg.codecs.LloydMax(bits=2)),
    "top-k 1 %": fg.chain(fg.TopK(fraction=0.01), fg.LogQuantizer(bits=4)),
    "top-k 0.1 %": fg.chain(fg.TopK(fraction=0.001), fg.LogQuantizer(bits=4)),
    "threshold 1 %": fg.chain(fg.Threshold(fraction=0.01), fg.LogQuantizer(bits=4)),
    "random-k 1 %": fg.codecs.RandomK(fraction=0.01),
    "FFT 64, 1 %": fg.chain(fg.Fft(block=64), fg.TopK(fraction=0.01), fg.LogQuantizer(bits=4)),
    "DCT 64, DeMo": fg.chain(fg.Dct(block=64), fg.ChunkTopK(chunk=64), fg.Cast("bfloat16")),
    "DCT 64, budget": fg.chain(fg.Dct(block=64), fg.Budget(ratio=100)),
    "budget": fg.Budget(ratio=100),
}
"""One codec of each family, by a short name."""
BENCH_LEGEND = """\
pays below: between two workers over a faster link it takes longer than the bytes
that it saves of float32."""
CodecTimes = tuple[str, float, float, int]
"""Name, median seconds to compress and to decompress, and bytes of a payload."""


def time_codecs(
    values: int, codecs: dict[str, fg.codecs.Codec], seconds: float
) -> list[CodecTimes]:
    """Time codecs on heavy-tailed values, in about `seconds` seconds."""
    like = jax.ShapeDtypeStruct((values,), jnp.float32)
    inputs = [(x, fg.Step.of(i, i)) for i, x in enumerate(heavy_tailed(like))]
    each, found = seconds / len(codecs) / 2, list[CodecTimes]()
    for name, codec in codecs.items():
        down = jax.jit(lambda a, codec=codec: fg.compress(codec, a[0], step=a[1]))
        up = jax.jit(lambda a, codec=codec: fg.decompress(codec, a[0], like, step=a[1]))
        sent = [(down(one), one[1]) for one in inputs]
        times = timed(down, inputs, each).seconds, timed(up, sent, each).seconds
        found.append((name, *times, fg.wire_bytes(codec, like)))
    return found


def show(values: int, rows: Sequence[CodecTimes]) -> str:
    """Format the table of one vector length."""
    size = 4 * values
    cells = [
        (
            name,
            quantity(down, "s"),
            quantity(up, "s"),
            quantity(sent, "B"),
            three_digits(size / sent),
            quantity(8 * max(0.0, (size - sent) / (down + up)), "bit/s"),
        )
        for name, down, up, sent in rows
    ]
    head = ("codec", "compress", "decompress", "sent", "ratio", "pays below")
    title = f"\n{values:,} values, {quantity(size, 'B')}"
    return "\n".join([title, table(head, cells), BENCH_LEGEND])


def run_bench(args: argparse.Namespace) -> None:
    """Save the device's figures for plans, and print the codec times for each size."""
    found = _devices.measure()
    print(f"{found.name}: {_devices.kept()}, for fftgrad plan --device", flush=True)
    for n in args.sizes:
        print(show(n, time_codecs(n, CODECS, args.seconds)), flush=True)


ISLANDS = """\
show every ten seconds which islands counted in the last rounds:
  watch -n 10 fftgrad islands status s3://bucket/run
"""
ROUNDS = 8
"""Number of rounds in the table, the last ones."""


def islands_command(parser: argparse.ArgumentParser) -> Run:
    parser.add_argument("what", choices=["status"], help="show the last rounds")
    parser.add_argument("url", help="URL of the store: s3://, gs://, az://, or a folder")
    return lambda args: print(show_islands(fg.islands.status(args.url)))


def show_islands(found: fg.islands.Status) -> str:
    """Format the last rounds and the open round."""
    rounds: list[tuple[str, ...]] = []
    for one in found.rounds[-ROUNDS:]:
        others = [f"{name} did not come" for name in one.missed]
        others += [f"{name}: {why}" for name, why in one.refused.items()]
        loss = "" if one.loss is None else f"{one.loss:.4f}"
        counted, waited = f"{len(one.counted)}", quantity(one.waited, "s")
        rounds.append((f"{one.round}", counted, loss, waited, _plain("; ".join(others))))
    came = _plain(", ".join(found.came)) or "nobody yet"
    open_round = f"open: round {found.open}, came: {came}; newest anchor: round {found.anchor}"
    head = ("round", "counted", "loss", "waited", "not counted")
    return f"{table(head, rounds, (0, 4))}\n{open_round}"


def _plain(text: str) -> str:
    """Replace characters that would move the cursor."""
    return "".join(mark if mark.isprintable() else "?" for mark in text)


COMMANDS = {
    "plan": (
        "predict whether compression pays over your link; print the code to paste",
        PLAN,
        plan_command,
    ),
    "analyze": ("analyze saved gradients and recommend a codec", ANALYZE, analyze_command),
    "bench": ("time the codecs on this machine", BENCH, bench_command),
    "islands": ("show the last rounds of a run of islands", ISLANDS, islands_command),
}


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    formatter = functools.partial(argparse.RawDescriptionHelpFormatter, width=79)
    every = "\n".join(examples for _, examples, *_ in COMMANDS.values())
    parser = argparse.ArgumentParser(
        "fftgrad", None, DESCRIPTION, f"{every}\n{EXIT_CODES}", formatter_class=formatter
    )
    parser.add_argument("--version", action="version", version=f"fftgrad {fg.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (about, examples, command) in COMMANDS.items():
        own = commands.add_parser(
            name,
            help=about,
            description=about,
            epilog=f"{examples}\n{EXIT_CODES}",
            formatter_class=formatter,
        )
        own.set_defaults(run=command(own))
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
