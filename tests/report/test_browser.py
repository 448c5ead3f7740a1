"""The report in a browser: it loads in silence, draws, and answers pointer and keys."""

import json

import pytest

from gossipgrad.report import write_report
from support.browser import CHROMIUM, Browser

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="the report is tested in Chromium, and none is installed"
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
def reports(tmp_path_factory, write_run_into):
    """A report of one run and one that compares three, one of them cut short."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        write_run_into(folder / "first"),
        write_run_into(folder / "second", world_size=8, lr=0.5),
        write_run_into(folder / ("third" + 20 * "-long"), world_size=2, strategy=NASTY),
    ]
    for name in ("summary.json", "trace.json", "metrics-rank1.jsonl"):
        (runs[2] / name).unlink()
    metrics = runs[2] / "metrics-rank0.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-30])
    return {
        "one": write_report(runs[0]),
        "three": write_report(*runs, out=folder / "three.html"),
    }


@pytest.fixture
def show(browser, reports):
    """Opens a report; at the end its console must be empty."""
    opened = []

    def open_page(name, **options):
        opened.append(browser.open(reports.get(name, name), **options))
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


@pytest.mark.parametrize("name", ["one", "three"])
@pytest.mark.parametrize("width", [390, 1280])
def test_everything_is_drawn_within_the_screen(show, name, width):
    page = show(name, width=width)
    drawn = page.evaluate(
        """[...document.querySelectorAll('.chart, .bars, .timeline')].map((box) => {
          const marks = box.querySelectorAll('svg path.line, svg .part, svg .bar');
          const size = box.querySelector(':scope > svg').getBBox();
          return [marks.length > 0, size.width > 100, size.x + size.width <= box.clientWidth + 1];
        })"""
    )
    assert len(drawn) == 5 + 4 + 1
    assert all(all(each) for each in drawn), drawn
    colours = page.evaluate(
        """[...document.querySelectorAll('canvas')].map((canvas) => {
          const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
          return new Set(new Uint32Array(data.buffer)).size;
        })"""
    )
    assert len(colours) == 3
    assert min(colours) > 2
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_pointing_at_a_curve_reads_its_values(show):
    page = show("one")
    chart = "[data-chart=loss] > svg[role=img]"
    assert tooltip(page) is None
    page.point_at(chart, x=0.5)
    heading, *rows = tooltip(page)
    assert heading.startswith("step 1")
    step = int(heading.split()[1])
    points = {
        series["label"]: dict(point[:2] for point in series["points"])
        for series in page.evaluate("JSON.parse(document.getElementById('data').textContent)")[
            "charts"
        ][0]["series"]
    }
    assert [row[:4] for row in rows] == ["mean", *["rank"] * 4]
    assert float(rows[0].removeprefix("mean")) == pytest.approx(points["mean"][step], rel=1e-3)
    page.press(chart, "ArrowRight")
    page.press(chart, "ArrowRight")
    assert tooltip(page)[0] == "step 2"
    page.press(chart, "Escape")
    assert tooltip(page) is None


def test_pointing_at_bars_and_squares_reads_their_values(show):
    page = show("one")
    page.point_at("[data-bars=traffic] > svg[role=img]", y=0.25)
    assert tooltip(page) == ["sent", "parameters or gradients1 kB"]
    page.point_at("[data-bars=outcomes] > svg[role=img]", y=0.3)
    assert tooltip(page) == ["rank 0", "delivered28 (93.33%)", "late2 (6.67%)"]
    page.press(".mixing canvas", "ArrowDown")
    heading, row = tooltip(page)
    assert heading == "rank 1 from rank 0"
    assert row.endswith("of 30 rounds")


def test_time_takes_the_place_of_steps(show):
    page = show("one")
    page.click("#axis")
    assert page.evaluate("document.getElementById('axis').ariaPressed") == "true"
    page.point_at("[data-chart=loss] > svg[role=img]", x=0.5)
    heading, *rows = tooltip(page)
    assert heading.startswith("after 1.")
    assert len(rows) == 5


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
        seen.append(
            (page.evaluate("document.getElementById('theme').textContent"), page.evaluate(ground))
        )
    assert seen == [("Theme: light", light), ("Theme: dark", dark), ("Theme: system", light)]


def test_the_timeline_moves_and_zooms(show):
    page = show("one")
    svg = ".timeline > svg[role=img]"
    assert count(page, f"{svg} .bar.forward") == 3 * 4
    page.evaluate("document.querySelector('[aria-label=\"Zoom out\"]').click()")
    assert count(page, f"{svg} .bar.forward") > 3 * 4
    page.turn_wheel(svg, -100, ctrl=True)
    page.turn_wheel(svg, -100, ctrl=True)
    zoomed = count(page, f"{svg} .bar.forward")
    page.turn_wheel(svg, -100, ctrl=False)
    assert count(page, f"{svg} .bar.forward") == zoomed, "the wheel alone scrolls the page"
    page.evaluate(
        "(() => { const input = document.querySelector('.controls .step'); input.value = 5;"
        "input.dispatchEvent(new Event('change')); })()"
    )
    steps = f"[...document.querySelectorAll('{svg} text')].map((t) => t.textContent)"
    shown = [text for text in page.evaluate(steps) if text.startswith("step")]
    assert shown == ["step 5", "step 6", "step 7"]
    page.drag(svg, -300)
    shown = [text for text in page.evaluate(steps) if text.startswith("step")]
    assert shown[-1] == "step 8"
    page.press(svg, "-")
    assert count(page, f"{svg} .bar.forward") > 3 * 4


def test_pointing_at_an_exchange_tells_of_it_and_marks_its_other_end(show):
    page = show("one")
    page.point_at(".timeline .bar.exchange")
    heading, *rows = tooltip(page)
    assert heading == "rank 0: exchange, 89 ms"
    assert "bytes500 bytes" in rows
    assert "outcomedelivered" in rows
    assert count(page, ".timeline .bar.partner") == 1


def test_runs_are_laid_over_each_other_and_hidden_one_by_one(show):
    page = show("three")
    lines = "[data-chart=loss] > svg[role=img] path.line"
    assert [count(page, f"{lines}.run-{run}") for run in range(3)] == [1, 1, 1]
    page.click("[data-run='1']")
    assert [count(page, f"{lines}.run-{run}") for run in range(3)] == [1, 0, 1]
    page.point_at("[data-chart=loss] > svg[role=img]", x=0.5)
    assert [row[:5] for row in tooltip(page)[1:]] == ["first", "third"]
    for run in (0, 2):
        page.click(f"[data-run='{run}']")
    assert count(page, lines) == 0
    assert page.evaluate("document.querySelector('[data-chart=loss] svg').textContent") is not None


def test_each_run_of_several_has_its_timeline_and_its_image(show):
    page = show("three")
    choose = (
        "(() => { const select = document.querySelector('%s select'); select.selectedIndex = 1;"
        "select.dispatchEvent(new Event('change'));"
        "return [...select.options].map((option) => option.textContent); })()"
    )
    assert page.evaluate(choose % ".timeline") == ["first", "second"]
    assert count(page, ".timeline .rank-name") == 4, "the first of eight ranks"
    assert page.evaluate(choose % ".mixing") == ["first", "second"]
    page.press(".mixing canvas", "ArrowDown")
    for _ in range(7):
        page.press(".mixing canvas", "ArrowDown")
    assert tooltip(page)[0] == "rank 7 from rank 0"


def test_mixing_follows_the_slider(show):
    page = show("one")
    text = "document.querySelector('.mixing output').textContent"
    before = page.evaluate(text)
    assert before.startswith("1 (round 1): 57.74% of the consensus distance left")
    page.press(".mixing input[type=range]", "ArrowRight")
    page.evaluate(
        "(() => { const s = document.querySelector('.mixing input'); s.value = 2;"
        "s.dispatchEvent(new Event('input')); })()"
    )
    assert page.evaluate(text).startswith("2 (rounds 1 to 2): ")


def test_what_a_file_holds_is_never_run(show, write_run):
    directory = write_run("<img src=x onerror='window.hurt = 1'>", strategy=NASTY, model=NASTY)
    summary = json.loads((directory / "summary.json").read_text())
    summary |= {"strategy": NASTY, "outcomes": {NASTY: 3}, "notes": [NASTY]}
    (directory / "summary.json").write_text(json.dumps(summary))
    trace = json.loads((directory / "trace.json").read_text())
    for event in trace["traceEvents"]:
        event.setdefault("args", {})[NASTY] = NASTY
        if event["ph"] == "X" and event["name"] == "forward":
            event["name"] = NASTY
        if event["name"] == "thread_name":
            event["args"]["name"] += NASTY
    (directory / "trace.json").write_text(json.dumps(trace))
    page = show(write_report(directory))
    page.point_at("[data-bars=outcomes] > svg[role=img]", y=0.1)
    page.point_at(".timeline .bar.other")
    assert tooltip(page)[0].startswith(f"rank 0: {NASTY}")
    assert page.evaluate("window.hurt") is None
