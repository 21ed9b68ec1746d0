"""Figures: one color for one kind of method, colors that differ for everybody, light and dark."""

import itertools
import pathlib
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

pytest.importorskip("matplotlib")
ROOT = pathlib.Path(__file__).parents[2]
FIGURES = sorted((ROOT / "docs/figures").glob("*.svg"))
EYES = {
    "usual": np.eye(3),
    # Machado, Oliveira and Fernandes 2009, full deficiency, in linear light.
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
}


@pytest.fixture
def style(imported):
    return imported("_style")


def linear(color):
    """The light of a color, of each primary."""
    values = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    """As WCAG has it."""
    low, high = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) + 0.05 for c in (one, other))
    return high / low


def lab(light):
    """CIE L*a*b*, in which distances are about as large as they look."""
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ np.clip(light, 0, 1) / [0.9505, 1.0, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def methods(style):
    """Colors of methods, on a light page and on a dark one."""
    found = {found for _, found in style.KINDS} | {style.FEW_BITS}
    return {"light": found, "dark": {style.DARK[one] for one in found}}


def test_every_color_has_one_for_a_dark_page(style):
    colors = {value for name, value in vars(style).items() if name.isupper() and is_color(value)}
    assert colors == set(style.DARK)
    assert len(set(style.DARK.values())) == len(style.DARK)


def is_color(value):
    return isinstance(value, str) and re.fullmatch("#[0-9a-f]{6}", value) is not None


def test_curves_and_text_stand_out_from_the_page(style):
    for page, colors in methods(style).items():
        paper, ink = (style.PAPER, style.INK)
        if page == "dark":
            paper, ink = style.DARK[paper], style.DARK[ink]
        assert contrast(ink, paper) > 12
        for color in colors:
            assert contrast(color, paper) > 3.2, (page, color)


@pytest.mark.parametrize("eye", EYES)
def test_kinds_of_methods_differ_for_everybody(style, eye):
    for page, colors in methods(style).items():
        seen = {color: lab(np.array(EYES[eye]) @ linear(color)) for color in colors}
        for one, other in itertools.combinations(sorted(seen), 2):
            away = float(np.linalg.norm(seen[one] - seen[other]))
            assert away > 18, (page, one, other, away)


def test_ours_dense_and_peers_never_look_alike(style, imported):
    kinds = {
        "dense": {"dense", "dense float32", "dense, Adam", "memory copy", "entropy bound"},
        "16 bits": {"bfloat16", "dense bfloat16", "dense, 16 bits", "bfloat16, two stages"},
        "peer": {"PyTorch DDP", "torch.topk 1 %", "lax.top_k 1 %", "PyTorch: PowerSGD, Adam"},
        "ours": {method.name for method in imported("methods").METHODS[2:]},
    }
    colors = {kind: {style.color(name) for name in names} for kind, names in kinds.items()}
    assert [len(colors[kind]) for kind in ("dense", "16 bits", "peer")] == [1, 1, 1]
    for one, other in itertools.combinations(colors.values(), 2):
        assert not one & other
    assert style.color("fftgrad: PowerSGD, Adam") == style.color("PowerSGD rank 4")
    assert style.color("fftgrad: budget 100x, Muon") == style.color("top-k 1 %, 4 bits")


def test_methods_of_one_kind_differ_by_their_dashes(style):
    looks = style.styles(["top-k 1 %", "PowerSGD rank 4", "top-k 1 %", "top-k 0.1 %"])
    assert list(looks) == ["top-k 1 %", "PowerSGD rank 4", "top-k 0.1 %"]
    assert [look["linestyle"] for look in looks.values()] == ["-", "-", style.DASHES[1]]
    pairs = {(look["color"], str(look["linestyle"])) for look in looks.values()}
    assert len(pairs) == 3


def test_labels_keep_apart_in_their_order_and_inside(style):
    apart = style.apart({"a": 5.0, "b": 4.0, "c": 90.0, "d": 6.0}, 12.0, 0.0, 100.0)
    assert list(apart) == ["b", "a", "d", "c"]
    heights = list(apart.values())
    assert min(np.diff(heights)) > 11.9
    assert heights[0] >= 0
    assert heights[-1] == pytest.approx(90.0)
    assert style.apart({"a": 500.0}, 12.0, 0.0, 100.0) == {"a": 100.0}
    for ends in ({"a": 99.0, "b": 98.0, "c": 100.0}, {"a": 1.0, "b": 2.0, "c": 0.0}):
        heights = list(style.apart(ends, 12.0, 0.0, 100.0).values())
        assert 0 <= heights[0] <= heights[-1] <= 100
        assert min(np.diff(heights)) > 11.9


def test_a_name_stands_behind_its_curve_in_its_color(style):
    figure = style.figure(3.0)
    axes = figure.subplots()
    looks = style.styles(["dense", "signs"])
    lines = {name: axes.plot([1, 2], [0, i], **looks[name])[0] for i, name in enumerate(looks)}
    style.label_ends(axes, lines)
    texts = {text.get_text(): text.get_color() for text in axes.texts}
    assert texts == {name: look["color"] for name, look in looks.items()}


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.stem)
def test_a_figure_is_as_wide_as_a_page_and_has_a_dark_one(style, path):
    text = path.read_text()
    root = ET.fromstring(text)
    assert float(root.get("width").removesuffix("pt")) == pytest.approx(72 * style.WIDTH)
    assert "@media (prefers-color-scheme:dark)" in text
    used = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", text))
    assert used <= set(style.DARK), used - set(style.DARK)


def test_a_file_is_the_same_when_it_is_drawn_again(style):
    def drawn():
        figure = style.figure(2.0)
        figure.subplots().plot([0, 1], [0, 1], color=style.INK)
        return style.svg(figure)

    assert drawn() == drawn()
