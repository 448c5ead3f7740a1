"""Loaded by the fork server: it ends with the launcher, and starts no worker for a dead one."""

import os
import sys

LAUNCHER = "GOSSIPGRAD_LAUNCHER"


def end_with_launcher() -> None:
    """Have Linux end this process with its parent, which the environment names."""
    launcher = os.environ.pop(LAUNCHER, None)
    if launcher is None:
        return
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != int(launcher):  # it died before
        os._exit(1)


end_with_launcher()
