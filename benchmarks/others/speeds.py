"""Speed-ups that papers name, against what their own shares and ratios allow in rings.

A paper says which share of a step its dense mean takes, and how many times fewer bytes its method
sends. A link on which a ring takes that share, a ring that gathers, and a codec that takes no time,
give the largest speed-up that a ratio allows where all of that holds. The FFT paper counts ratios
without positions and scales: there a second prediction is of all that is sent by fftgrad.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
from _record import RESULTS, head, markdown, parser, write

import fftgrad as fg

RESULT = RESULTS / "others" / "speeds.json"
NO_TIME = fg.advise.Timing(compress=0.0, decompress=0.0)
COLUMNS = ("model", "method", "published", "by the ratio, in rings", "by all that is sent here")


class Step(NamedTuple):
    """A dense step of others: its values, its workers, and the share that its mean takes."""

    model: str
    values: int
    workers: int
    share: float
    dense: fg.Recipe = fg.Recipe(fg.AllReduce())
    size: int = 4  # bytes of a value as it travels there


HALF, SIGNS = (fg.Recipe(fg.TwoStage(codec, 64)) for codec in (fg.Cast("float16"), fg.Sign()))
ALEXNET = Step("AlexNet", 62_500_000, 8, 0.6417)
RESNET = Step("ResNet32", 1_500_000, 8, 0.4396)
BERT = Step(
    "BERT-Large", 340_000_000, 64, 2275.43 / (35.71 + 2275.43 + 60.81 + 75.59), HALF, size=2
)
FFT, TOP_K = fg.methods.fft_sparsification(), fg.methods.top_k(0.15, memory=fg.NoMemory())
QSGD, TERNGRAD = fg.methods.qsgd(bits=3), fg.methods.terngrad(clip=None)
PUBLISHED: list[tuple[Step, str, float, float | None, fg.Recipe]] = [
    (ALEXNET, "FFT", 2.26, 21.3, FFT),
    (ALEXNET, "TernGrad", 1.81, 16.0, TERNGRAD),
    (ALEXNET, "QSGD", 1.73, 10.6, QSGD),
    (ALEXNET, "top-k", 1.53, 6.67, TOP_K),
    (RESNET, "FFT", 1.33, 21.3, FFT),
    (RESNET, "TernGrad", 1.24, 16.0, TERNGRAD),
    (RESNET, "QSGD", 1.21, 10.6, QSGD),
    (RESNET, "top-k", 1.12, 6.67, TOP_K),
    (BERT, "1-bit Adam, after its warm-up", 6.6, None, SIGNS),
]
"""What is published: the step, the method, the speed-up, the ratio as counted, and the method."""
FILLED = (30, 100)
"""Filled messages of so many times fewer bytes, of AlexNet."""


def counted(ratio: float) -> fg.Recipe:
    """A message of so many times fewer bytes, whatever is in it."""
    return fg.Recipe(fg.AllGather(fg.Budget(ratio=ratio)))


def speed(own: Step, recipe: fg.Recipe) -> float:
    """How many times faster than dense a step is at most."""
    params = jax.ShapeDtypeStruct((own.values,), "float32")
    ring = 2 * (own.workers - 1) / own.workers * own.size * own.values
    link = fg.advise.Link(ring / own.share, 0.0)  # a dense step takes one second

    def seconds(recipe: fg.Recipe) -> float:
        return fg.advise.predict_step(
            fg.compressed_pmean(recipe, axis_name="data"),
            params,
            step=1 - own.share,
            link=link,
            axes={"data": own.workers},
            timing=NO_TIME,
            algorithm="ring",
        )

    return seconds(own.dense) / seconds(recipe)


def rows() -> list[dict[str, Any]]:
    """A row for each speed-up, and for filled messages."""
    found: list[dict[str, Any]] = []
    for own, name, published, ratio, recipe in PUBLISHED:
        row: dict[str, Any] = {"model": own.model, "method": name, "published": published}
        if ratio is not None:
            row["counted"] = speed(own, counted(ratio))
        found.append(row | {"sent": speed(own, recipe)})
    for ratio in FILLED:
        filled = {"model": ALEXNET.model, "method": f"filled, {ratio} times"}
        found.append(filled | {"sent": speed(ALEXNET, counted(ratio))})
    return found


def tables(record: dict[str, Any]) -> str:
    """Of the rows."""

    def cell(row: dict[str, Any], key: str) -> str:
        return f"{row[key]:.2f}" if key in row else ""

    kinds = ("published", "counted", "sent")
    return markdown(
        COLUMNS,
        [
            [row["model"], row["method"], *(cell(row, kind) for kind in kinds)]
            for row in record["rows"]
        ],
    )


def main() -> None:
    """Predicts, writes JSON, and shows the table."""
    args = parser(__doc__, "others").parse_args()
    record = head() | {"rows": rows()}
    write(args.out / RESULT.name, record, rows="rows")
    print(tables(record))


if __name__ == "__main__":
    main()
