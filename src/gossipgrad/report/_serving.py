"""The report of a run in progress, served to a browser on this machine."""

import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ._page import page
from ._run import read_run

__all__ = ["ReportServer"]


class ReportServer(ThreadingHTTPServer):
    """Serves the report of one run, made for each request, on the loopback interface alone.

    The page reloads itself until the run has written its summary. Reads the run's folder and
    writes nothing.

    Args:
        run_dir: Directory that `gossipgrad train` writes to; it need not hold anything yet.
        port: 0 for any that is free.
        every_seconds: Between two reloads.

    Raises:
        ValueError: `every_seconds` is below 1, or the port cannot be had.
    """

    daemon_threads = True

    def __init__(
        self, run_dir: str | os.PathLike[str], *, port: int = 0, every_seconds: int = 5
    ) -> None:
        if every_seconds < 1:
            raise ValueError(f"every_seconds is {every_seconds}: reload every second or less often")
        self.run_dir, self.every_seconds = Path(run_dir), int(every_seconds)
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except (OSError, OverflowError) as error:
            raise ValueError(f"port {port} cannot be had: {error}; leave it out") from error

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        """Answers with the page, or with what is missing for one."""
        server = self.server
        assert isinstance(server, ReportServer)
        if self.path != "/":
            self.send_error(404)
            return
        is_over = False
        try:
            # One read: a run that ends between two would be shown as going on, and not reload.
            run = read_run(server.run_dir)
            text, kind, is_over = page([run]), "text/html", bool(run.summary)
        except ValueError as error:
            text, kind = f"waiting for the run: {error}", "text/plain"
        body = text.encode(errors="backslashreplace")
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        if not is_over:
            self.send_header("Refresh", str(server.every_seconds))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Says nothing of requests."""
