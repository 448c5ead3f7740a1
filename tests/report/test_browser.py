"""The page in a browser: it loads in silence, draws, and answers pointer and keys."""

import json

import pytest

from gossipgrad.report import write_report
from support.browser import CHROMIUM, Browser

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="the page is tested in Chromium, and none is installed"
    ),
]
NASTY = "</script><script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>"
TOOLTIP = "document.getElementById('tooltip')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory, golden, copy_run):
    """Of the run, of one whose metric is a negative, growing or tiny error, and of several."""

    def measured(name, values):
        def measure(record):
            if record["event"] == "epoch":
                record |= {"accuracy": values[record["epoch"]]}
            elif name == "tiny":
                record["loss"] *= 1e-9
            return record

        metric = {"metric_name": "error", "metric_format": ".4g", "accuracy": values[-1]}
        summary = metric | {"consensus_distance": 3.706e-7}
        return copy_run(folder / name, summary=summary, record=measure)

    folder = tmp_path_factory.mktemp("runs")
    metrics = {
        "negative": [-25.0, -7.0, -5.0, -3.2],
        "large": [25.0, 7.0, 5.0, 3.2],
        "tiny": [3e-7, 2e-7, 1.5e-7, 1.1e-7],
        "missing": [None, 2.0, None, None],
    }
    runs = {name: measured(name, values) for name, values in metrics.items()}
    cut = copy_run(folder / ("cut" + 20 * "-long"), config={"model": NASTY}, without="[st]*.json")
    return {
        **{name: write_report(run) for name, run in runs.items()},
        "one": write_report(golden, out=folder / "one.html"),
        "three": write_report(golden, runs["large"], cut, out=folder / "three.html"),
    }


@pytest.fixture
def show(browser, pages):
    """Opens a page; at the end its console must be empty."""
    opened = []

    def open_page(name, **options):
        opened.append(browser.open(pages.get(name, name), **options))
        return opened[-1]

    yield open_page
    for page in opened:
        assert page.complaints() == []
        page.close()


def tooltip(page):
    """The rows of what is shown beside the pointer; None when nothing is."""
    return page.evaluate(
        f"{TOOLTIP}.hidden ? null : [{TOOLTIP}.querySelector('strong').textContent,"
        f"...[...{TOOLTIP}.querySelectorAll('tr')].map((row) => row.textContent)]"
    )


def count(page, selector):
    return page.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length")


@pytest.mark.parametrize("name", ["one", "three", "negative", "large", "tiny", "missing"])
@pytest.mark.parametrize("width", [390, 1280])
def test_everything_is_drawn_within_its_frame_and_the_screen(show, name, width):
    page = show(name, width=width)
    frames = page.evaluate(
        """[...document.querySelectorAll('.chart, .timeline')].map((box) => {
          const root = box.querySelector(':scope > svg');
          const { width, height } = root.viewBox.baseVal;
          const marks = [...root.querySelectorAll('path.line, circle, text, .bar')];
          return [marks.length, marks.every((mark) => {
            const b = mark.getBBox();
            return b.x >= -1 && b.y >= -1
              && b.x + b.width <= width + 1 && b.y + b.height <= height + 1;
          })];
        })"""
    )
    assert len(frames) == 6 + 1
    assert all(marks > 3 and fits for marks, fits in frames), frames
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    broken = page.evaluate(
        """[...document.querySelectorAll('.card .value')].filter((value) => {
          const range = document.createRange();
          range.selectNodeContents(value);
          return range.getClientRects().length > 1 || value.scrollWidth > value.clientWidth;
        }).map((value) => value.textContent)"""
    )
    assert broken == [], "no number is broken in two"
    marks = page.evaluate(
        "[...document.querySelectorAll('[data-chart=metric] text.end')].map((t) => t.textContent)"
    )
    assert len({*marks}) == len(marks) > 1


def test_pointing_and_keys_read_values(show):
    page = show("one")
    chart = "[data-chart=loss] > svg[role=img]"
    assert tooltip(page) is None
    page.point_at(chart, x=0.5)
    heading, *rows = tooltip(page)
    assert heading.startswith("step ")
    assert [row[:4] for row in rows] == ["mean", *["rank"] * 4]
    page.press(chart, "ArrowRight")
    page.press(chart, "ArrowRight")
    assert tooltip(page)[0] == "step 20"
    page.press(chart, "Escape")
    assert tooltip(page) is None
    page.click("#axis")
    page.point_at(chart, x=0.5)
    assert tooltip(page)[0].startswith("after ")
    page.press(".mixing canvas", "ArrowDown")
    heading, row = tooltip(page)
    assert heading == "rank 1 from rank 0"
    assert row.endswith("of 5 rounds")


def test_the_theme_follows_the_system_until_it_is_chosen(show):
    page = show("one", dark=True)
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.prefer(dark=False)
    light = page.evaluate(ground)
    assert dark != light
    seen = []
    for _ in range(3):
        page.click("#theme")
        seen.append(page.evaluate(ground))
    assert seen == [light, dark, light]


def test_the_timeline_moves_zooms_and_marks_the_other_end_of_an_exchange(show):
    page = show("one")
    svg = ".timeline > svg[role=img]"
    texts = f"[...document.querySelectorAll('{svg} text')].map((t) => t.textContent)"
    page.evaluate(
        "(() => { const input = document.querySelector('.controls .step'); input.value = 6;"
        "input.dispatchEvent(new Event('change')); })()"
    )
    assert "step 6" in page.evaluate(texts)
    assert "step 9" not in page.evaluate(texts)
    page.point_at(svg, by_x=-300)
    assert "step 6" not in page.evaluate(texts)
    shown = count(page, f"{svg} .bar")
    page.press(svg, "+")
    assert count(page, f"{svg} .bar") < shown
    for _ in range(8):
        page.press(svg, "-")
    page.point_at(".timeline .bar.exchange:not(.missed)")
    heading, *rows = tooltip(page)
    assert heading.startswith("rank 0: exchange")
    assert any(row.startswith("outcome") for row in rows)


def test_runs_lie_over_each_other_and_are_hidden_one_by_one(show):
    page = show("three")
    lines = "[data-chart=loss] > svg[role=img] path.line"
    assert [count(page, f"{lines}.run-{run}") for run in range(3)] == [1, 1, 1]
    page.click("[data-run='1']")
    assert [count(page, f"{lines}.run-{run}") for run in range(3)] == [1, 0, 1]
    choices = "[...document.querySelectorAll('.timeline option')].map((o) => o.textContent)"
    assert {"golden", "large"} <= set(page.evaluate(choices))


def test_what_a_file_holds_is_never_run(show, copy_run, tmp_path):
    def spoil(event):
        event.setdefault("args", {})[NASTY] = NASTY
        if event["name"] == "forward":
            event["name"] = NASTY
        return event

    summary = {"strategy": NASTY, "outcomes": {NASTY: 3}, "notes": [NASTY], "metric_name": NASTY}
    run = copy_run(tmp_path / "<img src=x onerror='window.hurt = 1'>", summary=summary, event=spoil)
    page = show(write_report(run))
    page.point_at(".timeline .bar.other")
    assert tooltip(page)[0].startswith(f"rank 0: {NASTY}")
    assert page.evaluate("window.hurt") is None
