"""The file of a rank's model, whose space is taken at the start: a disk may be full at the end."""

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors.torch import save
from torch import Tensor, nn

from gossipgrad.errors import GossipError

from ._layout import RunDir

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
# What a file has beside the values: less than this a tensor, and once more.
_HEADER_BYTES = 1024


def reserve_model(run_dir: RunDir, rank: int, model: nn.Module) -> None:
    """Take the space that the model of a rank will need; local.

    Where the file system cannot, there is none until the end.

    Raises:
        GossipError: There is no such space.
    """
    tensors = [*model.parameters(), *model.buffers()]
    size_bytes = sum(tensor.nbytes + _HEADER_BYTES for tensor in tensors) + _HEADER_BYTES
    path, way_out = run_dir.rank_model(rank), "make room, or name another folder with --out"
    with suppress(OSError), _explaining_full_disk(run_dir, way_out), path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)


def write_model(run_dir: RunDir, rank: int, weights: Mapping[str, Tensor]) -> None:
    """Leave the model of a rank for whoever puts the run together.

    Raises:
        GossipError: There is no space for it; the last checkpoint stays.
        FileNotFoundError: The run was put together meanwhile.
    """
    path, way_out = run_dir.rank_model(rank), "the run has no checkpoint to go on from"
    if run_dir.holds_checkpoints:
        way_out = f"make room, and go on from the last checkpoint with --resume {run_dir.path}"
    with (
        _explaining_full_disk(run_dir, way_out),
        path.open("r+b" if path.exists() else "wb") as file,
    ):
        file.write(save(dict(weights)))
        file.truncate()


def write_errors(path: Path, text: str) -> bool:
    """Write a traceback; whether the disk took it."""
    try:
        path.write_text(text)
    except OSError:
        with suppress(OSError):
            path.unlink()
        return False
    return True


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
