"""Whether a file is the one that was meant."""

import hashlib
from pathlib import Path

DELETE_IT = "; delete it to fetch it anew."


def check_sha256(path: Path, sha256: str) -> None:
    """Raise `ValueError` if the content of a file has another SHA-256 than `sha256`; says both."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ValueError(f"{path} has SHA-256 {found}, expected {sha256}{DELETE_IT}")
