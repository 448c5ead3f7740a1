"""Memory that processes of one host share: a part is read where it lies, and passes no socket.

    sender                                         receiver
    its snapshot lies in an arena, a file in memory
      ── header, and where in which arena ────────>  maps that arena, once
                                                     subtracts its own snapshot from the part
      <── has read ───────────────────────────────   the part's memory may be written again

A process proves that it can read the arenas of another one before it is sent anything in this way:
it may run in a container of its own, or as another user.
"""

import logging
import os
import struct
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["DESCRIPTOR_BYTES", "Arena", "Reader", "offer"]

logger = logging.getLogger(__name__)

_DESCRIPTOR = struct.Struct("!IIQ16s")  # process, its file, offset, and token of the arena
DESCRIPTOR_BYTES = _DESCRIPTOR.size
_TOKEN_BYTES = 16
_PAGE_BYTES = 4096
_LEAST_BYTES = 1 << 16  # of an arena: less is sent as fast as it is found

_offered: dict[int, tuple[int, bytes]] = {}  # bytes and descriptor of each piece, by its address


class Arena:
    """Memory of this process that others of its host can read, in pieces of the given sizes.

    Where that is not possible (no memfd, no `/proc`), and for little memory, of this process alone.
    """

    def __init__(self, sizes_bytes: Sequence[int]) -> None:
        self._memory: Tensor | None = None
        self._token, self._end = os.urandom(_TOKEN_BYTES), _PAGE_BYTES
        self._addresses: list[int] = []
        if sum(sizes_bytes) < _LEAST_BYTES or not hasattr(os, "memfd_create"):
            return
        try:
            self._file = os.memfd_create("gossipgrad")
            weakref.finalize(self, _close, self._file, self._addresses)
            os.ftruncate(self._file, _PAGE_BYTES + sum(map(_paged, sizes_bytes)))
            os.pwrite(self._file, self._token, 0)
            self._memory = _map(f"/proc/self/fd/{self._file}")
        except (OSError, RuntimeError) as error:  # torch's own, too
            logger.debug("parts pass sockets, as there is no memory to share: %s", error)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the next piece, uninitialised; flat, in host memory."""
        if self._memory is None:
            return torch.empty(numel, dtype=dtype, device="cpu")
        size_bytes = numel * dtype.itemsize
        piece = self._memory.narrow(0, self._end, size_bytes).view(dtype)
        descriptor = _DESCRIPTOR.pack(os.getpid(), self._file, self._end, self._token)
        self._end += _paged(size_bytes)
        _offered[piece.data_ptr()] = size_bytes, descriptor
        self._addresses.append(piece.data_ptr())
        return piece


def offer(payload: Tensor) -> bytes | None:
    """Return where other processes find a payload; None if it is no piece of an arena."""
    size_bytes, descriptor = _offered.get(payload.data_ptr(), (0, b""))
    return descriptor if descriptor and size_bytes == payload.nbytes else None


class Reader:
    """The arenas of other processes, each mapped when something is first read in it."""

    def __init__(self) -> None:
        self._arenas: dict[tuple[int, int], Tensor] = {}

    def read(self, descriptor: bytes | bytearray, size_bytes: int) -> Tensor:
        """Return a piece as bytes, not to be written; raises `OSError` if it cannot be read."""
        process, file, offset, token = _DESCRIPTOR.unpack(descriptor)
        arena = self._arenas.get((process, file))
        if arena is None or not _has_token(arena, token):  # that file's number was used again
            try:
                arena = _map(f"/proc/{process}/fd/{file}")
            except RuntimeError as error:  # torch's own
                raise OSError(f"memory of process {process} cannot be read") from error
            if not _has_token(arena, token):
                raise OSError(f"file {file} of process {process} is no arena of this run")
            self._arenas[process, file] = arena
        if offset % _PAGE_BYTES or offset + size_bytes > arena.numel():
            raise OSError(f"no piece of an arena begins at {offset}")
        return arena.narrow(0, offset, size_bytes)


def _map(path: str) -> Tensor:
    return torch.from_file(path, shared=True, size=Path(path).stat().st_size, dtype=torch.uint8)


def _has_token(arena: Tensor, token: bytes) -> bool:
    return arena[:_TOKEN_BYTES].numpy().tobytes() == token


def _paged(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES


def _close(file: int, addresses: list[int]) -> None:
    for address in addresses:
        _offered.pop(address, None)
    os.close(file)
