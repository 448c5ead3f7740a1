import os
import signal
import threading
from datetime import timedelta

import torch.distributed as dist

from gossipgrad.train._signals import hear_stops


def test_a_stop_is_heard_while_the_main_thread_waits_for_a_store():
    store = dist.HashStore()
    before = signal.getsignal(signal.SIGINT)
    with hear_stops(lambda stops: store.set("heard", "")) as stops:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        store.wait(["heard"], timedelta(seconds=60))
    assert stops.caught == [signal.SIGINT]
    assert stops.first == signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is before
