"""Headless Chromium over its own pipe: DevTools messages, nothing to install."""

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.waiting import HANG_SECONDS

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
_OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--no-default-browser-check",
    "--force-prefers-reduced-motion",
    "--hide-scrollbars",
)
# Chromium reads commands from 3 and writes to 4.
_BECOME = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One Chromium process; `open` gives pages in it. Every wait ends after a minute."""

    def __init__(self, profile: Path, *, timeout_seconds: float = HANG_SECONDS) -> None:
        assert CHROMIUM is not None
        self._timeout_seconds = timeout_seconds
        self._last_id = 0
        self._rest = b""
        self.events: list[dict[str, Any]] = []
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # Both must lie above 4 until the process that becomes Chromium puts them there.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (theirs_in, theirs_out)]
        for fd in (theirs_in, theirs_out):
            os.close(fd)
        command = [CHROMIUM, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", _BECOME, *map(str, high), *command],
            pass_fds=high,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in high:
            os.close(fd)

    def close(self) -> None:
        """End the process."""
        os.close(self._out)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def open(
        self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False
    ) -> "Page":
        """Load a file in a page of its own, and wait until it has drawn."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attach = {"targetId": target, "flatten": True}
        page = Page(self, target, self.call("Target.attachToTarget", attach)["sessionId"])
        for domain in ("Runtime", "Log", "Page"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        page.prefer(dark=dark)
        page.call("Page.navigate", {"url": path.resolve().as_uri()})
        page.wait_for(lambda: self._seen("Page.loadEventFired", page.session), "the page to load")
        page.settle()
        return page

    def call(self, method: str, parameters: Any = None, session: str | None = None) -> Any:
        """Send a command and return its result."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters or {}}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + self._timeout_seconds
        while True:
            answer = self._read(deadline, method)
            if answer.get("id") != self._last_id:
                self.events.append(answer)
                continue
            assert "error" not in answer, f"{method}: {answer['error']}"
            return answer["result"]

    def _seen(self, method: str, session: str) -> bool:
        return any(e["method"] == method and e.get("sessionId") == session for e in self.events)

    def _read(self, deadline: float, waiting_for: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"Chromium did not answer {waiting_for}"
            data = os.read(self._in, 1 << 20)
            assert data, f"Chromium ended before it answered {waiting_for}"
            self._rest += data
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)


class Page:
    """One page: evaluates scripts in it, and points, clicks and types as a user does."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self._browser = browser
        self._target = target
        self.session = session

    def call(self, method: str, parameters: Any = None) -> Any:
        """Send a command to this page."""
        return self._browser.call(method, parameters, self.session)

    def evaluate(self, script: str) -> Any:
        """The value of an expression, as JSON holds it."""
        answer = self.call(
            "Runtime.evaluate",
            {"expression": script, "returnByValue": True, "awaitPromise": True},
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def settle(self) -> None:
        """Wait until the page has drawn what it was told."""
        self.evaluate("new Promise((r) => requestAnimationFrame(() => requestAnimationFrame(r)))")

    def wait_for(self, happened: Callable[[], bool], what: str) -> None:
        """Ask until something has happened; the page answers meanwhile."""
        deadline = time.monotonic() + 60
        while not happened():
            assert time.monotonic() < deadline, f"waited for {what}"
            self.evaluate("new Promise((r) => setTimeout(r, 10))")

    def resize(self, width: int, height: int = 900) -> None:
        """Give the page another size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, *, dark: bool) -> None:
        """Say what the system's theme is."""
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", {"features": [theme]})

    def place_of(self, selector: str, x: float = 0.5, y: float = 0.5) -> tuple[float, float]:
        """A point of an element in the viewport, once it is scrolled to; shares of its size."""
        found = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const r = e.getBoundingClientRect();"
            f"return [r.left + {x} * r.width, r.top + {y} * r.height]; }})()"
        )
        return found[0], found[1]

    def point_at(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """Move the pointer over a point of an element."""
        self._mouse("mouseMoved", *self.place_of(selector, x, y))
        self.settle()

    def click(self, selector: str) -> None:
        """Click the middle of an element."""
        at = self.place_of(selector)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self._mouse(kind, *at)
        self.settle()

    def drag(self, selector: str, by_x: float) -> None:
        """Press in the middle of an element, move to the side, let go."""
        x, y = self.place_of(selector)
        self._mouse("mousePressed", x, y)
        self._mouse("mouseMoved", x + by_x, y)
        self._mouse("mouseReleased", x + by_x, y)
        self.settle()

    def press(self, selector: str, key: str) -> None:
        """Press a key while an element has the focus and the pointer is out of the way."""
        self._mouse("mouseMoved", 1, 1)
        self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        self.settle()
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", {"type": "keyDown", "key": key, **text})
        self.call("Input.dispatchKeyEvent", {"type": "keyUp", "key": key})
        self.settle()

    def complaints(self) -> list[str]:
        """Errors and warnings on the console, exceptions, refused loads."""
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self.session:
                continue
            told = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(told["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled" and told["type"] in (
                "error",
                "warning",
                "assert",
            ):
                found.append(str(told["args"]))
            elif event["method"] == "Log.entryAdded" and told["entry"]["level"] in (
                "error",
                "warning",
            ):
                found.append(told["entry"]["text"])
        return found

    def close(self) -> None:
        """Close the page."""
        self._browser.call("Target.closeTarget", {"targetId": self._target})

    def _mouse(self, kind: str, x: float, y: float) -> None:
        pressed = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        held = {"buttons": 1} if kind == "mousePressed" else {}
        self.call("Input.dispatchMouseEvent", {"type": kind, "x": x, "y": y, **pressed, **held})
