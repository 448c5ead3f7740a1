"""A polite end from outside is heard as Ctrl-C: the blocks are left, and nothing stays behind."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def _interrupted(number: int, _frame: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


@contextmanager
def ends_as_ctrl_c() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt inside the block; one that is ignored stays so.

    Example:
        >>> import os
        >>> try:
        ...     with ends_as_ctrl_c():
        ...         os.kill(os.getpid(), signal.SIGTERM)
        ... except KeyboardInterrupt as error:
        ...     print(error)
        SIGTERM
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    heard = [number for number in _SIGNALS if before[number] != signal.SIG_IGN]  # as of nohup
    for number in heard:
        signal.signal(number, _interrupted)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number])
