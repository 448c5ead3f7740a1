"""The page in a browser: it loads in silence, draws, and answers pointer and keys.

Headless Chromium over its own pipe: DevTools messages, nothing to install.
"""

import json
import os
import select
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gossipgrad.report import write_report
from support.waiting import HANG_SECONDS

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--disable-extensions", "--disable-background-networking", "--disable-component-update"),
    *("--no-first-run", "--no-default-browser-check"),
    *("--force-prefers-reduced-motion", "--hide-scrollbars", "--remote-debugging-pipe"),
)
DRAWN = "new Promise((r) => requestAnimationFrame(() => requestAnimationFrame(r)))"
LOADED = (
    "new Promise((r) => document.readyState === 'complete' ? r() : addEventListener('load', r))"
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="the page is tested in Chromium, and none is installed"
    ),
]
NASTY = "</script><script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>"
TOOLTIP = "document.getElementById('tooltip')"


class Browser:
    """One Chromium process; `open` gives pages in it."""

    def __init__(self, profile: Path) -> None:
        self._last_id, self._rest = 0, b""
        self.events: list[dict[str, Any]] = []
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # Chromium reads commands from 3 and writes to 4; a shell copies the pipes to these.
        copies = f'exec {{a}}<&{theirs_in} {{b}}>&{theirs_out}; exec "$@" 3<&$a 4>&$b'
        chromium = [CHROMIUM or "", *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", copies, "-", *chromium],
            pass_fds=[theirs_in, theirs_out],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def open(self, path: Path, *, width: int = 1280, dark: bool = False) -> "Page":
        """Load a file in a page of its own, and wait until it has drawn."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        page = Page(self, target, attached["sessionId"])
        for domain in ("Runtime", "Log", "Page"):
            page.call(f"{domain}.enable")
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        page.call("Emulation.setDeviceMetricsOverride", **size)
        page.prefer(dark=dark)
        page.call("Page.navigate", url=path.resolve().as_uri())
        page.evaluate(LOADED)
        page.evaluate(DRAWN)
        return page

    def call(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        """Send a command and return its result; what else comes is kept in `events`."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters}
        message |= {"sessionId": session} if session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._read(method)).get("id") != self._last_id:
            self.events.append(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _read(self, waiting_for: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], HANG_SECONDS)
            data = os.read(self._in, 1 << 20) if ready else b""
            assert data, f"Chromium did not answer {waiting_for}"
            self._rest += data
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)


class Page:
    """One page: evaluates scripts in it, and points, clicks and types as a user does."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self._browser, self._target, self._session = browser, target, session

    def call(self, method: str, **parameters: Any) -> Any:
        """Send a command to this page."""
        return self._browser.call(method, self._session, **parameters)

    def evaluate(self, script: str) -> Any:
        """The value of an expression, as JSON holds it."""
        options = {"returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", expression=script, **options)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def prefer(self, *, dark: bool) -> None:
        """Set the system's theme."""
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])

    def point_at(self, selector: str, x: float = 0.5, by_x: float | None = None) -> None:
        """Move the pointer over an element, at a share of its width; drag it from there."""
        left, top, width, height = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const r = e.getBoundingClientRect();"
            "return [r.left, r.top, r.width, r.height]; })()"
        )
        at = left + x * width, top + 0.5 * height
        self._mouse("mouseMoved", *at)
        if by_x is not None:
            self._mouse("mousePressed", *at, button="left", clickCount=1, buttons=1)
            self._mouse("mouseMoved", at[0] + by_x, at[1])
            self._mouse("mouseReleased", at[0] + by_x, at[1], button="left", clickCount=1)
        self.evaluate(DRAWN)

    def click(self, selector: str) -> None:
        """Click the middle of an element."""
        self.point_at(selector, by_x=0.0)

    def press(self, selector: str, key: str) -> None:
        """Press a key while an element has the focus and the pointer is out of the way."""
        self._mouse("mouseMoved", 1, 1)
        self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        self.evaluate(DRAWN)
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.evaluate(DRAWN)

    def complaints(self) -> list[Any]:
        """Errors and warnings on the console, exceptions, refused loads."""
        ours = [e for e in self._browser.events if e.get("sessionId") == self._session]
        bad = ("error", "warning", "assert")
        return [
            event["params"]
            for event in ours
            if event["method"] == "Runtime.exceptionThrown"
            or (event["method"] == "Runtime.consoleAPICalled" and event["params"]["type"] in bad)
            or (event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] in bad)
        ]

    def close(self) -> None:
        """Close the page."""
        self._browser.call("Target.closeTarget", targetId=self._target)

    def _mouse(self, kind: str, x: float, y: float, **options: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **options)


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
