"""A small web site in a thread, that can misbehave."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["Site", "served"]


@dataclass
class Site:
    """What is served, and how.

    Attributes:
        files: Content by path.
        cut: Bytes after which the connection of an answer ends; None: never.
        stall: Whether such an answer goes silent instead.
        requests: Paths that were asked for so far.
    """

    files: dict[str, bytes]
    cut: int | None = None
    stall: bool = False
    requests: list[str] = field(default_factory=list)
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
            site.requests.append(self.path)
            content = site.files.get(self.path)
            if content is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: site.cut])
            if site.stall:
                site.over.wait()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False  # `server_close` waits for them, and their sockets are closed
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
