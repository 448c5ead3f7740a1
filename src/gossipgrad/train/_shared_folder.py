"""Whether all ranks see the folder that one of them has opened for the run."""

import secrets
import time
from pathlib import Path

from ._layout import RunDir

_POLL_SECONDS = 0.1
# A network file system may show a new file to other machines after a while.
_VISIBLE_SECONDS = 15.0


def leave_token(run_dir: RunDir) -> str:
    """Leave a file that is new, and give what stands in it."""
    token = secrets.token_hex(8)
    _path(run_dir).write_text(token)
    return token


def must_be_shared(run_dir: RunDir, token: str, *, wait_seconds: float = _VISIBLE_SECONDS) -> None:
    """Refuse a folder that has the name of the one that was opened, and is another one.

    Args:
        run_dir: The folder, as this rank sees it.
        token: What `leave_token` gave on the rank that opened it.
        wait_seconds: How long to wait for the file to be seen.

    Raises:
        ValueError: It is another one: checkpoints of the run would never be complete in it.
    """
    deadline = time.monotonic() + wait_seconds
    while not _holds(_path(run_dir), token):
        if time.monotonic() > deadline:
            raise ValueError(
                f"{run_dir.path} is not the same folder as on the machine that opened the run, and "
                "a checkpoint is complete where the parts of all ranks lie together: name a folder "
                "that all machines share with --out, or leave --checkpoint-every out."
            )
        time.sleep(_POLL_SECONDS)


def _path(run_dir: RunDir) -> Path:
    return run_dir.partial / "opened"


def _holds(path: Path, token: str) -> bool:
    try:
        return path.read_text() == token
    except OSError:
        return False
