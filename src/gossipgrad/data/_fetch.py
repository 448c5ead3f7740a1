"""Fetch a file once: to a temporary name, checked, then renamed."""

import contextlib
import os
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from gossipgrad.errors import GossipError

_TIMEOUT_SECONDS = 30.0


def fetch(url: str, path: Path, check: Callable[[Path], object], *, way_out: str) -> None:
    """Download `url` to `path`, which exists afterwards only if `check` accepted it.

    Args:
        url: Where the file is.
        path: Where it goes; its folder is made.
        check: Raises `ValueError` on a file that is not the right one.
        way_out: What the user can do instead, for the message.

    Raises:
        GossipError: The file could not be fetched or is not the right one; nothing is left behind.
    """
    partial: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response,
            tempfile.NamedTemporaryFile(
                dir=path.parent, prefix=f".{path.name}.", delete=False
            ) as file,
        ):
            partial = Path(file.name)
            shutil.copyfileobj(response, file)
        check(partial)
        partial.chmod(0o644)
        os.replace(partial, path)  # noqa: PTH105  (atomic, and says so)
    except (OSError, urllib.error.URLError) as error:
        raise GossipError(
            f"could not fetch {url} to {path.parent} ({error}); {way_out}."
        ) from error
    except ValueError as error:
        raise GossipError(f"{url} did not serve the expected file: {error}") from error
    finally:
        if partial is not None:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
