"""Strangers who come to ports again and again: a process of its own, which loads no torch.

Run by `benchmarks.flood` as `python -m benchmarks._strangers KIND MECHANISM RATE PORT ...`, until
its input ends.
"""

import random
import socket
import struct
import sys
import threading
import time
from collections import deque
from contextlib import suppress

KINDS = ("silence", "garbage", "half a greeting", "a greeting", "made-up credentials")
_HELD = 400  # connections to each port, more than may wait; the oldest is given up for a new one
_RESET = struct.pack("ii", 1, 0)  # closed at once, so that no port stays taken


def said(kind: str, mechanism: str, rng: random.Random) -> bytes:
    """What a stranger says before it falls silent, by ZMTP 3.0.

    Args:
        kind: One of `KINDS`.
        mechanism: `PLAIN` or `CURVE`, as the port has it.
        rng: For what is made up.
    """
    greeting = (
        b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.encode().ljust(20, b"\0") + bytes(32)
    )
    word = rng.randbytes(32)
    if mechanism == "CURVE":  # version, padding, a key, a nonce, a box
        hello = b"\x05HELLO\x01\x00" + bytes(72) + word + rng.randbytes(8) + rng.randbytes(80)
    else:
        name = b"1." + rng.randbytes(16).hex().encode()
        hello = b"\x05HELLO" + bytes([len(name)]) + name + b"\x40" + word.hex().encode()
    return {
        "silence": b"",
        "garbage": rng.randbytes(200),
        "half a greeting": greeting[:32],
        "a greeting": greeting,
        "made-up credentials": greeting + b"\x04" + bytes([len(hello)]) + hello,
    }[kind]


def come(port: int, kind: str, mechanism: str, per_second: float) -> None:
    """Comes to a port so many times a second, or as often as it can, for ever."""
    rng = random.Random(port)
    held: deque[socket.socket] = deque()
    due = time.monotonic()
    while True:
        due += 1 / per_second
        time.sleep(max(0.0, due - time.monotonic()))
        if len(held) >= _HELD:
            held.popleft().close()
        with suppress(OSError):
            connection = socket.create_connection(("127.0.0.1", port), 5.0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            held.append(connection)
            connection.sendall(said(kind, mechanism, rng))


def main() -> None:
    kind, mechanism, per_second, *ports = sys.argv[1:]
    for port in ports:
        arguments = (int(port), kind, mechanism, float(per_second))
        threading.Thread(target=come, args=arguments, daemon=True).start()
    sys.stdin.read()  # until whoever started this has ended


if __name__ == "__main__":
    main()
