"""Files of a run: lines, whole files, the model, and whether all ranks see the same folder."""

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import Tensor, nn

from gossipgrad.checkpoint import model_tensors, write_safetensors
from gossipgrad.errors import GossipError

from ._layout import RunDir


class LinesFile:
    """Appends whole lines; after an error it is as it was before, and can go on."""

    def __init__(self, path: Path, offset: int | None = None) -> None:
        goes_on = offset is not None and path.exists()
        # Without a buffer, which would try again what was given up, and keep on growing.
        self._file = path.open("r+b" if goes_on else "wb", buffering=0)
        self.size_bytes = 0
        self._torn = False  # there may be something behind the last whole line
        if goes_on:
            # A machine that broke down may have lost the end, and left a part of a line.
            self.size_bytes = path.read_bytes()[:offset].rfind(b"\n") + 1
            self._go_back()

    def write(self, line: str) -> None:
        """Append a line."""
        rest = memoryview(f"{line}\n".encode())
        whole = self.size_bytes + len(rest)
        if self._torn:
            self._go_back()
        self._torn = True
        try:
            while rest:  # a full disk first takes a part
                rest = rest[self._file.write(rest) :]
            self.size_bytes, self._torn = whole, False
        except BaseException:  # Ctrl-C, too
            with contextlib.suppress(OSError):  # then before the next line
                self._go_back()
            raise

    def close(self) -> None:
        """Close it; may be called again."""
        self._file.close()

    def _go_back(self) -> None:
        """To the end of the last whole line."""
        self._file.seek(self.size_bytes)
        self._file.truncate()
        self._torn = False


def write_whole(path: Path, text: str) -> None:
    """Write a text beside, wait until it is on the disk, and have it take the name of the file."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
# What a file has beside the values: less than this a tensor, and once more.
_HEADER_BYTES = 1024


def reserve_model(run_dir: RunDir, rank: int, model: nn.Module) -> None:
    """Take the space that the model of a rank will need; local.

    Where the file system cannot, there is none until the end.
    """
    tensors = model_tensors(model, copy=False).values()
    size_bytes = sum(tensor.nbytes + _HEADER_BYTES for tensor in tensors) + _HEADER_BYTES
    path, way_out = run_dir.rank_model(rank), "make room, or name another folder with --out"
    with suppress(OSError), _explaining_full_disk(run_dir, way_out), path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)


def write_model(run_dir: RunDir, rank: int, weights: Mapping[str, Tensor]) -> None:
    """Leave the model of a rank for the rank that puts the run together."""
    path, way_out = run_dir.rank_model(rank), "the run has no checkpoint to go on from"
    if run_dir.holds_checkpoints:
        way_out = f"make room, and go on from the last checkpoint with --resume {run_dir.path}"
    with _explaining_full_disk(run_dir, way_out):
        write_safetensors(path, weights, {"format": "pt"})


@contextmanager
def _explaining_full_disk(run_dir: RunDir, way_out: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        raise GossipError(
            f"no space in {run_dir.partial} for the model ({error.strerror}): {way_out}"
        ) from error


def where_weights_are(run_dir: RunDir) -> str:
    """Where the weights are of a run without results, and how to continue."""
    text = f"the weights of each rank that reached its end are in {run_dir.partial}"
    if run_dir.holds_checkpoints:
        text += f"; gossipgrad train --resume {run_dir.path} writes the rest"
    return text


def write_errors(path: Path, text: str) -> bool:
    """Write a traceback; whether the disk took it."""
    try:
        path.write_text(text)
    except OSError:
        with suppress(OSError):
            path.unlink()
        return False
    return True


# A network file system may show a new file to other machines after a while.
_VISIBLE_SECONDS = 15.0


def leave_token(run_dir: RunDir) -> str:
    """Leave a file that is new, and give what stands in it."""
    token = secrets.token_hex(8)
    run_dir.opened.write_text(token)
    return token


def check_shared(run_dir: RunDir, token: str, *, unless: Callable[[], object]) -> None:
    """Refuse a folder that has the name of the one that rank 0 opened, and is another one."""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while True:
        with suppress(OSError):
            if run_dir.opened.read_text() == token:
                return
        unless()
        if time.monotonic() > deadline:
            raise ValueError(
                f"{run_dir.path} is not the same folder as on the machine of rank 0, which puts "
                "together what all ranks leave there: name one that all machines share with --out."
            )
        time.sleep(0.1)
