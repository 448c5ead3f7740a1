"""A file of lines, none of which is ever there in part."""

import contextlib
from pathlib import Path


class LinesFile:
    """Appends whole lines; after an error it is as it was before, and can go on.

    Args:
        path: The file; replaced.
        offset: Goes on with the old file behind so many bytes, which is cut off there; None: anew.

    Attributes:
        size_bytes: Of the file.

    Raises:
        OSError: It cannot be opened.
    """

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
        """Append a line.

        Raises:
            OSError: The disk does not take all of it; then it has none of it, or what cannot be cut
                off now is before the next line.
        """
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
        """Close it; may be called again.

        Raises:
            OSError: The disk does not take what was written, as some say only now.
        """
        self._file.close()

    def _go_back(self) -> None:
        """To the end of the last whole line."""
        self._file.seek(self.size_bytes)
        self._file.truncate()
        self._torn = False
