"""Worker processes from a fork server that has torch loaded, so that they start quickly."""

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection


def ensure_fork_server(preload: list[str]) -> None:
    """Start the fork server of this process with some modules loaded, unless it runs already.

    It ends with this process; workers that it has started continue.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    # Ctrl-C in a terminal, or the SIGTERM of a batch system, reaches all processes, and would end
    # the fork server. The resource tracker unblocks the signals when it starts, so it goes first.
    multiprocessing.resource_tracker.ensure_running()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class ForkedProcess:
    """A function in a process of the fork server, with the interface of `subprocess.Popen`."""

    def __init__(
        self, body: Callable[[], object], environ: Mapping[str, str], *, name: str
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        reader, writer = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(body, dict(environ), writer), name=name)
        try:
            self._process.start()
        except EOFError as error:
            raise OSError("the fork server is gone") from error
        finally:
            writer.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.stderr = os.fdopen(os.dup(reader.fileno()), "rb", buffering=0)
        reader.close()

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self) -> int | None:
        """Wait until it has ended."""
        self._process.join()
        return self._process.exitcode


def _run(body: Callable[[], object], environ: dict[str, str], errors: Connection) -> None:
    os.setsid()  # Ctrl-C in a terminal reaches only the launcher, which passes it on
    os.dup2(errors.fileno(), 2)
    errors.close()
    os.environ.clear()
    os.environ.update(environ)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
        code = body()
    except KeyboardInterrupt:  # it came before the body could handle it
        code = 128 + signal.SIGINT
    raise SystemExit(code)
