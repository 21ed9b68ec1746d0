"""How figures look: one color for one kind of method, names in these colors, light and dark.

A figure is an SVG file of 6 inches with text of 10 points, which a page may show at 400 pixels. A
style sheet in the file has the colors of a dark page.
"""

import io
import pathlib
import re
from collections.abc import Iterable
from typing import Any

import matplotlib.style
from matplotlib.figure import Figure

POINTS = 10
PAPER, INK, MUTED, GRID, FAINT = "#ffffff", "#1f2328", "#6e7781", "#dfe3e8", "#b9c0c8"
PEER, LOW_RANK, SPARSE, LOCAL = "#a3492d", "#1672d3", "#239967", "#8c147e"
BASIS, FEW_BITS = "#148fc1", "#a47f0f"
LIGHT = (PAPER, INK, MUTED, GRID, FAINT, PEER, LOW_RANK, SPARSE, LOCAL, BASIS, FEW_BITS)
DARK = (
    "#1e2129", "#e6edf3", "#838c96", "#3a414d", "#5d6673", "#f05a29", "#5faef3", "#74daac",
    "#d656c1", "#85d5f5", "#e8d071",
)  # fmt: skip
KINDS = (
    (r"torch|ddp|^lax\.", PEER),
    (r"^bf16|^bfloat16|^dense.*(bfloat16|16 bits)", MUTED),
    (r"^dense|^memory copy|bound$|float32$", INK),
    (r"local|loco\b|fragments", LOCAL),
    (r"power|acp-|dion", LOW_RANK),
    (r"\bfft\b|\bdct\b|\bdemo\b", BASIS),
    (r"top-k|random|budget|\dx\b|dgc|redsync|scalecom|shared|int32", SPARSE),
)
"""Methods by their names, the first that fits; all others send a few bits for each value."""
DASHES = ("-", (0, (5, 1.6)), (0, (1, 1.4)))
matplotlib.style.use(pathlib.Path(__file__).parent / "fftgrad.mplstyle")


def figure(height: float) -> Figure:
    """An empty one of the usual width."""
    return Figure(figsize=(6.0, height), layout="constrained")


def color(name: str) -> str:
    """That of a method, the same in each figure."""
    own = name.lower()
    return next((found for form, found in KINDS if re.search(form, own)), FEW_BITS)


def styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Color and dashes of some methods: those of one kind in a figure differ by their dashes."""
    out, used = dict[str, dict[str, Any]](), dict[str, int]()
    for name in dict.fromkeys(names):
        own = color(name)
        out[name] = {"color": own, "linestyle": DASHES[used.setdefault(own, 0) % len(DASHES)]}
        used[own] += 1
    return out


def svg(drawn: Figure) -> str:
    """The file, with a style sheet for dark pages."""
    out = io.StringIO()
    drawn.savefig(out, format="svg", metadata={"Date": None})
    rules = "".join(
        f'[style*="{part}: {light}"]{{{part}:{dark}!important}}'
        for light, dark in zip(LIGHT, DARK, strict=True)
        for part in ("fill", "stroke")
    )
    sheet = f"<style>@media (prefers-color-scheme:dark){{{rules}}}</style>"
    head, mark, rest = out.getvalue().partition("<defs>")
    return re.sub(r" +$", "", f"{head}{sheet}{mark}{rest}", flags=re.MULTILINE)


def write(drawn: Figure, path: pathlib.Path) -> None:
    """Writes it as SVG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg(drawn), encoding="utf-8")
