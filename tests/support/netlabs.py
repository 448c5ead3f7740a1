"""What is there of laboratories on this machine."""

import time

from benchmarks.netlab import _record, _system


def of(name):
    """Namespaces and record of a laboratory that are still there."""
    left = [namespace for namespace in _system.namespaces() if namespace.startswith(name)]
    return left + [record.name for record in _record.records() if record.name == name]


def name_of(network):
    return network.namespace(0).rpartition("-")[0]


def wait_until_gone(is_left, timeout_seconds=20.0):
    deadline = time.monotonic() + timeout_seconds
    while left := is_left():
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def running(pid):
    return _record.started(pid) is not None
