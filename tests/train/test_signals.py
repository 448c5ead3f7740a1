import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from gossipgrad.train._signals import hear_stops


def test_a_stop_is_heard_while_the_main_thread_waits_for_a_store():
    heard = []
    before = signal.getsignal(signal.SIGINT)
    with hear_stops(lambda stops: heard.append(time.monotonic())) as stops:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(dist.DistStoreError):
            dist.HashStore().wait(["nothing"], timedelta(seconds=1))
        returned = time.monotonic()
    assert len(heard) == 1
    assert heard[0] < returned - 0.5
    assert stops.first == signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is before
