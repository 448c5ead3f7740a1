"""Whether a file is the one that was meant."""

import hashlib
from pathlib import Path

DELETE_IT = "; delete it to fetch it anew."


def check_sha256(path: Path, sha256: str, *, way_out: str = DELETE_IT) -> None:
    """Raise `ValueError` if the content of a file has another SHA-256 than `sha256`; says both."""
    found = sha256_of(path)
    if found != sha256:
        raise ValueError(f"{path} has SHA-256 {found}, expected {sha256}{way_out}")


def sha256_of(path: Path) -> str:
    """SHA-256 of the content of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
