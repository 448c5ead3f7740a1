"""The page's colours: contrast enough to read, and apart for those who see fewer of them."""

import re
from importlib import resources
from itertools import combinations

import numpy as np
import pytest

CSS = resources.files("gossipgrad.report").joinpath("page", "report.css").read_text()
PAIRS = dict(re.findall(r"--([\w-]+): light-dark\((#\w{6}, #\w{6})\);", CSS))
THEMES = ("light", "dark")
# Linear RGB as seen without one kind of cone (Machado, Oliveira and Fernandes 2009, severity 1).
SEEN = {
    "all cones": np.eye(3),
    "protanopia": np.array(
        [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]
    ),
    "deuteranopia": np.array(
        [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]
    ),
}


def linear(name, theme):
    text = PAIRS[name].split(", ")[THEMES.index(theme)]
    value = np.array([int(text[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def contrast(one, other, theme):
    """The contrast ratio of WCAG 2, 1 to 21."""
    weights = np.array([0.2126, 0.7152, 0.0722])
    high, low = sorted((weights @ linear(name, theme) for name in (one, other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def lab(colour):
    """CIE L*a*b*, in which 10 is a difference that is seen at a glance."""
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    share = to_xyz @ np.clip(colour, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(share > 0.008856, np.cbrt(share), 7.787 * share + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize(
    ("text", "back"),
    [
        *((text, back) for text in ("text", "muted") for back in ("page", "panel")),
        ("text", "warn-back"),
        ("text", "mark"),
        ("accent", "panel"),
    ],
)
def test_text_can_be_read(theme, text, back):
    assert contrast(text, back, theme) >= 4.5


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize(
    "mark",
    [
        *(f"run-{run}" for run in range(8)),
        *("accent", "exact", "edge-strong", "heat-2", "delivered", "late", "dead"),
        *("forward", "backward", "optimizer", "exchange", "wait", "mix", "snapshot", "select"),
    ],
)
def test_marks_stand_out_from_their_panel(theme, mark):
    assert contrast(mark, "panel", theme) >= 3.0


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize(
    "name", ["forward", "backward", "optimizer", "exchange", "wait", "mix", "select"]
)
def test_names_on_bars_can_be_read(theme, name):
    assert contrast("bar-text", name, theme) >= 3.0


@pytest.mark.parametrize("seen", SEEN.values(), ids=SEEN)
@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize(
    "names",
    [[f"run-{run}" for run in range(4)], ["delivered", "late", "dead", "void"], ["mean", "exact"]],
    ids=["runs", "outcomes", "curves"],
)
def test_colours_side_by_side_differ_for_everyone(seen, theme, names):
    names = ["accent" if name == "mean" else name for name in names]
    for one, other in combinations(names, 2):
        difference = lab(seen @ linear(one, theme)) - lab(seen @ linear(other, theme))
        assert np.linalg.norm(difference) > 20, (one, other)


def test_lines_of_runs_differ_in_their_dashes_too():
    dashes = dict(re.findall(r"\.run-(\d) \{[^}]*?stroke-dasharray: ([^;]+);", CSS))
    assert len(dashes) == len(set(dashes.values())) == 7, "the first is a plain line"


def test_a_span_that_the_page_knows_has_a_colour_of_its_own():
    script = resources.files("gossipgrad.report").joinpath("page", "timeline.js").read_text()
    (known,) = re.findall(r"knownNames = new Set\(\[(.*?)\]\)", script, re.DOTALL)
    names = re.findall(r'"(\w+)"', known)
    assert "select" in names
    assert all(f".{name} {{ fill: var(--{name}); }}" in CSS for name in names)
