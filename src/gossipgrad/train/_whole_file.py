"""Small files that are on the disk as a whole, or as they were before."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text beside, wait until it is on the disk, and have it take the name of the file."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
