"""A small web site in a thread, that can be told to misbehave."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Site:
    """What is served, and how.

    Attributes:
        files: Content by path.
        ranges: Whether requests for a part get one.
        cut: Bytes after which the connection ends, one for each answer; then none.
        stall: Whether such an answer goes silent instead.
        refuse: Status and `Retry-After` of the next answers; then files are served.
        requests: Path and `Range` of what was asked for so far.
    """

    files: dict[str, bytes]
    ranges: bool = True
    cut: list[int] = field(default_factory=list)
    stall: bool = False
    refuse: list[tuple[int, str | None]] = field(default_factory=list)
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    address: str = ""
    over: threading.Event = field(default_factory=threading.Event)


@contextmanager
def served(files: dict[str, bytes]) -> Iterator[Site]:
    """Serve files on loopback for as long as the block."""
    site = Site(files)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            asked = self.headers.get("Range")
            site.requests.append((self.path, asked))
            if site.refuse:
                status, retry_after = site.refuse.pop(0)
                self.send_response(status)
                if retry_after is not None:
                    self.send_header("Retry-After", retry_after)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            content = site.files.get(self.path)
            if content is None:
                self.send_error(404)
                return
            start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and site.ranges else None
            if start is not None and start >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.end_headers()
                return
            rest = content[start:]
            self.send_response(200 if start is None else 206)
            if start is not None:
                size = len(content)
                self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
            self.send_header("Content-Length", str(len(rest)))
            self.end_headers()
            if site.cut:
                self.wfile.write(rest[: site.cut.pop(0)])
                if site.stall:
                    site.over.wait()
                return
            self.wfile.write(rest)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    site.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield site
    finally:
        site.over.set()
        server.shutdown()
        server.server_close()
        thread.join()
