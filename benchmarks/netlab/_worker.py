"""Moves bytes between hosts and tells how fast; run on a host, told what to do line by line.

Imports nothing of this package, so that 16 of them start within a fraction of a second.
"""

import json
import socket
import sys
import threading
import time
from typing import Any

_CONNECT_SECONDS = 10.0
_TAIL_SECONDS = 0.05  # senders go on a little, so that the last window is full
_CHUNK_BYTES = 1 << 18
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33  # above the system's limits; of asm/socket.h


def send(connection: socket.socket, chunk: int, until: float) -> None:
    """Sends as fast as the link takes it."""
    data = bytes(chunk)
    try:
        while (left := until - time.monotonic()) > 0:
            connection.settimeout(left)
            connection.send(data)
    except (TimeoutError, OSError):
        pass  # the receiver has seen enough


def receive(connection: socket.socket, start: float, stop: float) -> float:
    """Bits a second that arrived between `start` and `stop`, by the monotonic clock."""
    buffer = bytearray(_CHUNK_BYTES)
    total = 0
    samples: list[tuple[float, int]] = []
    try:
        while (left := stop - time.monotonic()) > 0:
            connection.settimeout(left)
            total += (count := connection.recv_into(buffer))
            if count == 0:
                break
            if (now := time.monotonic()) >= start:
                samples[1:] = [(now, total)]
    except (TimeoutError, OSError):
        pass
    if len(samples) < 2:
        return 0.0
    (first, before), (last, after) = samples
    return 8 * (after - before) / (last - first) if last > first else 0.0


def enlarge(connection: socket.socket, size: int) -> None:
    """Buffers for as long as a busy machine may leave this process waiting."""
    connection.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, size)
    connection.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, size)


def serve(address: str) -> None:
    """Answers orders until the input ends."""
    with socket.create_server((address, 0), backlog=512) as server:
        tell({"port": server.getsockname()[1]})
        for line in sys.stdin:
            order = json.loads(line)
            server.settimeout(_CONNECT_SECONDS)
            outgoing = []
            for flow, host, port in order["connect"]:
                connection = socket.create_connection((host, port), _CONNECT_SECONDS)
                enlarge(connection, order["buffer"])
                connection.sendall(flow.to_bytes(4, "big"))
                outgoing.append(connection)
            incoming = {}
            for _ in range(order["accept"]):
                connection, _peer = server.accept()
                connection.settimeout(_CONNECT_SECONDS)
                enlarge(connection, order["buffer"])
                incoming[int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big")] = connection
            tell({})
            start = float(sys.stdin.readline())
            tell(move(outgoing, incoming, order, start))


def move(
    outgoing: list[socket.socket],
    incoming: dict[int, socket.socket],
    order: dict[str, Any],
    begin: float,
) -> dict[str, Any]:
    """All flows of this host at once, from `begin` on."""
    start = begin + order["settle"]
    stop = start + order["seconds"]
    rates: dict[int, float] = {}

    def take(flow: int, connection: socket.socket) -> None:
        rates[flow] = receive(connection, start, stop)

    threads = [threading.Thread(target=take, args=item) for item in incoming.items()]
    threads += [
        threading.Thread(target=send, args=(connection, order["chunk"], stop + _TAIL_SECONDS))
        for connection in outgoing
    ]
    time.sleep(max(0.0, begin - time.monotonic()))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for connection in [*outgoing, *incoming.values()]:
        # What is still queued is dropped, or it would stand before the next round.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()
    return {"rates": rates}


def tell(answer: dict[str, Any]) -> None:
    """One line to whoever gives the orders."""
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
