"""Headless Chromium over its own pipe: DevTools messages, nothing to install."""

import json
import os
import select
import shutil
import subprocess
from pathlib import Path
from typing import Any

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
