"""A tree of tensors and plain values on its way over a link of two, in acknowledged pieces."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gossipgrad.comm._plain_values import flatten, unflatten
from gossipgrad.comm._transport import Arrival, Lost, Transport
from gossipgrad.errors import GossipError

__all__ = ["MOST_BYTES", "ParcelEnd", "ParcelError", "ParcelRefusedError"]

PIECE_BYTES = 1 << 18
MOST_BYTES = 2 * PIECE_BYTES  # of a message; CURVE adds to what a piece has
_WINDOW_BYTES = 16 * PIECE_BYTES  # sent and not acknowledged
_ALIGNED_BYTES = 64
_LOOK_SECONDS = 0.1
_SIGN_SECONDS = 1.0  # between signs of life of who has nothing to send yet
_LINGER_SECONDS = 2.0


class ParcelError(GossipError):
    """A parcel has not come: the other end is gone, or silent."""


class ParcelRefusedError(ParcelError):
    """The other end says why it sends none."""


class ParcelEnd:
    """One of the two ends of a link that a parcel travels over; closes the link at its end.

    Either end hears of the other at least every few seconds; if not, `ParcelError` says so.

    Args:
        transport: Of this link alone, for messages of `MOST_BYTES` at most.
        peer: The other end.
        patience_seconds: How long it may be silent.
        stop: Asked in between whether to give up.
    """

    def __init__(
        self,
        transport: Transport,
        peer: int,
        *,
        patience_seconds: float,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._transport = transport
        self._peer = peer
        self._patience_seconds = patience_seconds
        self._stop = stop
        self._told: list[tuple[dict[str, Any], Tensor | None]] = []
        self._sign_seconds = 0.0

    def close(self) -> None:
        """Ends the link."""
        self._transport.close(_LINGER_SECONDS)

    def say(self, what: str, **more: Any) -> None:
        """Sends a word."""
        self._send({"say": what, **more})

    def send_sign(self) -> None:
        """Shows that this end lives, if it has not for a second."""
        if time.monotonic() - self._sign_seconds > _SIGN_SECONDS:
            self.say("wait")

    def hear(self, *expected: str) -> tuple[dict[str, Any], Tensor | None]:
        """The next of the words that are awaited, and what came with it.

        Raises:
            ParcelError: The other end is gone, silent for too long, or refuses.
        """
        silent_since = time.monotonic()
        while True:
            while self._told:
                word, payload = self._told.pop(0)
                if word["say"] == "refuse":
                    raise ParcelRefusedError(str(word["why"]))
                if word["say"] in expected:
                    return word, payload
                silent_since = time.monotonic()
            self.look(_LOOK_SECONDS)
            if not self._told and time.monotonic() - silent_since > self._patience_seconds:
                raise ParcelError(f"it was silent for {self._patience_seconds:g} s")

    def look(self, timeout_seconds: float) -> None:
        """Takes in what has come, waiting for it so long at most.

        Raises:
            ParcelError: The other end is gone, or this one is to stop.
        """
        if self._stop():
            raise ParcelError("this end is closed")
        lost = False
        for event in self._transport.receive(timeout_seconds):
            if isinstance(event, Lost):
                lost = True
            elif (word := _read(event)) is not None:
                self._told.append((word, event.payload))
        if lost and not self._told:  # what it said last counts
            raise ParcelError("its link broke")

    def send(self, tree: Any) -> None:
        """Sends a tree of tensors in host memory and plain values, and waits until it has come.

        Raises:
            ParcelError: It has not.
        """
        text, tensors = flatten(tree)
        shapes = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
        outline = _bytes_of(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))
        stream = [outline, *map(_bytes_of, tensors)]
        total = sum(_aligned(part.numel()) for part in stream)
        outlined = bytearray(json.dumps(shapes).encode())
        self._send(
            {"say": "begin", "total": total, "text": outline.numel(), "kinds": len(outlined)}
        )
        sent = came = 0
        for piece in _pieces([torch.frombuffer(outlined, dtype=torch.uint8), *stream]):
            while sent - came > _WINDOW_BYTES:
                came = self.hear("came")[0]["bytes"]
            self._send({"say": "piece"}, piece)
            sent += piece.numel()
        while came < sent:
            came = self.hear("came")[0]["bytes"]

    def await_word(self, what: str) -> None:
        """Returns when the other end has said a word, which is heard again.

        Raises:
            ParcelError: It has not.
        """
        self._told.insert(0, self.hear(what))

    def receive(self) -> Any:
        """The tree that the other end sends.

        Raises:
            ParcelError: It has not come.
        """
        began, _ = self.hear("begin")
        first = _aligned(began["kinds"])
        whole = torch.empty(first + began["total"], dtype=torch.uint8)
        filled = 0
        while filled < whole.numel():
            _, piece = self.hear("piece")
            size = 0 if piece is None else piece.numel()
            if not 0 < size <= min(PIECE_BYTES, whole.numel() - filled):
                raise ParcelError(f"a piece of {size} bytes does not fit")
            assert piece is not None
            whole[filled : filled + size].copy_(piece)
            filled += size
            self.say("came", bytes=filled)
        kinds = json.loads(whole[: began["kinds"]].numpy().tobytes())
        text = whole[first : first + began["text"]].numpy().tobytes()
        at, tensors = first + _aligned(began["text"]), []
        for name, shape in kinds:
            dtype = getattr(torch, name)
            size = dtype.itemsize * torch.Size(shape).numel()
            tensors.append(whole[at : at + size].view(dtype).view(shape))
            at += _aligned(size)
        return unflatten(text, tensors)

    def _send(self, word: dict[str, Any], payload: Tensor | None = None) -> None:
        self._sign_seconds = time.monotonic()
        self._transport.send(self._peer, json.dumps(word).encode(), payload)


def _read(arrival: Arrival) -> dict[str, Any] | None:
    """The word of a message, None if it is not one of a parcel."""
    try:
        word = json.loads(arrival.header)
    except ValueError:
        return None
    return word if isinstance(word, dict) and "say" in word else None


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _pieces(parts: Sequence[Tensor]) -> Iterator[Tensor]:
    """All parts one after the other, each filled up to where the next may begin, cut to pieces."""
    held: list[Tensor] = []
    size = 0
    for part in parts:
        padding = torch.zeros(_aligned(part.numel()) - part.numel(), dtype=torch.uint8)
        for chunk in (*part.split(PIECE_BYTES), padding):
            if size + chunk.numel() > PIECE_BYTES:
                yield torch.cat(held)
                held, size = [], 0
            held.append(chunk)
            size += chunk.numel()
    if size:
        yield torch.cat(held)
