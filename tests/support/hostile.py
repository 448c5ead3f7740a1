"""A client that means harm: what it says to a port, and a tap on genuine connections."""

import contextlib
import itertools
import random
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from gossipgrad.comm import ZeroMQTransport, _waiting

__all__ = [
    "ATTACKS",
    "Tap",
    "command",
    "dial",
    "few_may_wait",
    "greeting",
    "is_open",
    "port_of",
    "under_attack",
]

Attack = Callable[[socket.socket, random.Random, "Tap"], None]


def greeting(mechanism: bytes) -> bytes:
    """The first 64 bytes of a ZMTP 3.0 connection."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def command(body: bytes) -> bytes:
    return b"\x06" + len(body).to_bytes(8, "big") + body


def port_of(end: ZeroMQTransport, rank: int | None = None) -> int:
    """Where a rank listens, as one knows; its own port by default."""
    endpoint = end._endpoints[end.rank if rank is None else rank]
    return int(endpoint.rpartition(":")[2])


def few_may_wait(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """So many connections may wait at a door, whatever the system allows."""
    monkeypatch.setattr(_waiting, "_LEAST_WAITING", most)
    monkeypatch.setattr(_waiting, "_MOST_WAITING", most)


def dial(port: int, host: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection((host, port), timeout=30.0)


def is_open(connection: socket.socket) -> bool:
    """Whether the other end has not closed; what it said is thrown away."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 12):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


class Tap:
    """Listens to connections that it passes on, and keeps what the dialling end said."""

    def __init__(self) -> None:
        self.recorded: list[bytearray] = []
        self._listeners: list[socket.socket] = []
        self._open: list[socket.socket] = []
        self._accepting: list[threading.Thread] = []

    def on(self, port: int) -> int:
        """A port that leads to another one."""
        listener = socket.create_server(("127.0.0.1", 0))
        self._listeners.append(listener)
        thread = threading.Thread(target=self._accept, args=(listener, port), daemon=True)
        thread.start()
        self._accepting.append(thread)
        return listener.getsockname()[1]

    def close(self) -> None:
        for listener in self._listeners:
            _close(listener)
        for thread in self._accepting:  # opens nothing more
            thread.join(30.0)
        for connection in self._open:
            _close(connection)

    def _accept(self, listener: socket.socket, port: int) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                self._open.append(near)
                far = dial(port)
                self._open.append(far)
                far.settimeout(None)
                said = bytearray()
                self.recorded.append(said)
                for pair in ((near, far, said), (far, near, bytearray())):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket, said: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                said += data
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


def _close(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()


def garbage(connection: socket.socket, rng: random.Random, tap: Tap) -> None:
    connection.sendall(rng.randbytes(rng.randrange(1, 2000)))


def garbage_after_a_greeting(connection: socket.socket, rng: random.Random, tap: Tap) -> None:
    connection.sendall(greeting(rng.choice((b"PLAIN", b"CURVE"))) + rng.randbytes(500))


def no_credentials(connection: socket.socket, rng: random.Random, tap: Tap) -> None:
    ready = command(b"\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH")
    connection.sendall(greeting(b"NULL") + ready + b"\x00\x05hello")


def made_up_credentials(connection: socket.socket, rng: random.Random, tap: Tap) -> None:
    name, word = b"1." + rng.randbytes(16).hex().encode(), rng.randbytes(32).hex().encode()
    hello = b"\x05HELLO" + bytes([len(name)]) + name + bytes([len(word)]) + word
    connection.sendall(greeting(b"PLAIN") + command(hello) + command(b"\x08INITIATE") + bytes(99))


def huge(connection: socket.socket, rng: random.Random, tap: Tap) -> None:
    size = rng.choice((1 << 62, 1 << 33, 1 << 19))
    connection.sendall(greeting(rng.choice((b"PLAIN", b"CURVE"))))
    connection.sendall(b"\x06" + size.to_bytes(8, "big") + bytes(1 << 16))


def replay(connection: socket.socket, rng: random.Random, tap: Tap) -> None:
    connection.sendall(bytes(rng.choice(tap.recorded)))


ATTACKS: Sequence[Attack] = (
    garbage,
    garbage_after_a_greeting,
    no_credentials,
    made_up_credentials,
    huge,
    replay,
)


@contextlib.contextmanager
def under_attack(ports: Sequence[int], tap: Tap, *, silent: int = 30) -> Iterator[None]:
    """Every port is attacked in all ways, again and again, and held open in silence."""
    over = threading.Event()

    def attack(port: int) -> None:
        rng = random.Random(port)
        half = greeting(b"PLAIN")[:20]
        with contextlib.ExitStack() as held:
            for number in range(silent):
                waiting = held.enter_context(dial(port))
                if number % 2:
                    waiting.sendall(half)
            for act in itertools.cycle(ATTACKS):
                with contextlib.suppress(OSError), dial(port) as connection:
                    if act is not replay or tap.recorded:
                        act(connection, rng, tap)
                    over.wait(0.005)  # most are sent away meanwhile
                if over.is_set():
                    return

    threads = [threading.Thread(target=attack, args=(port,), daemon=True) for port in ports]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
