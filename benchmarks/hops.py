"""Functions, classes and files of gossipgrad that run in one round of gossip, by a trace of calls.

Four ranks as threads on in-process links; what is traced is rank 0, its training thread and the
threads that use its transport, over one step and the compute behind it, in the steady state.

    PYTHONPATH=CHECKOUT/src python -P benchmarks/hops.py [--mode sync] [--names]
"""

import argparse
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist

import gossipgrad as gg
from gossipgrad.comm import Group, Hub, InProcessTransport

WORLD_SIZE, STEPS, TRACED = 4, 16, 8
PACKAGE = Path(gg.__file__).parent

called: dict[int, set[tuple[str, str]]] = defaultdict(set)  # by thread: file and qualified name
on_stack: set[tuple[str, str]] = set()  # whenever a payload is handed to the transport
own_threads: set[int] = set()
recording = threading.Event()


def _known(frame) -> tuple[str, str] | None:
    """File and name of a frame's function; None outside the package and the transport."""
    code = frame.f_code
    if not code.co_filename.startswith(str(PACKAGE)) or code.co_name.startswith("<"):
        return None
    file = str(Path(code.co_filename).relative_to(PACKAGE))
    return None if file == "comm/_in_process.py" else (file, code.co_qualname)


def trace(frame, event: str, _) -> None:
    if event == "call" and recording.is_set() and (known := _known(frame)):
        called[threading.get_ident()].add(known)


class Traced(InProcessTransport):
    """Rank 0's: whoever calls it works for rank 0."""

    def send(self, peer, header, payload=None):
        own_threads.add(threading.get_ident())
        frame = sys._getframe(1) if payload is not None and recording.is_set() else None
        while frame is not None:
            if known := _known(frame):
                on_stack.add(known)
            frame = frame.f_back
        return super().send(peer, header, payload)

    def receive(self, timeout_seconds):
        own_threads.add(threading.get_ident())
        return super().receive(timeout_seconds)


def train(rank: int, store: dist.Store, hub: Hub, mode: str) -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    group = Group(dist.PrefixStore("ranks", store), rank, WORLD_SIZE, timeout_seconds=60.0)

    def links(_):
        return Traced(hub, 0) if rank == 0 else hub.transport(rank)

    with gg.gossip(model, optimizer, mode=mode, process_group=group, transport=links):
        for step in range(STEPS):
            model(torch.ones(1, 64)).sum().backward()
            time.sleep(0.1)  # compute, in which the partner's part arrives
            if rank == 0:
                own_threads.add(threading.get_ident())
                (recording.set if step == TRACED else recording.clear)()
            optimizer.step()
            optimizer.zero_grad()
    group.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mode", default="overlap")
    parser.add_argument("--names", action="store_true", help="every function")
    options = parser.parse_args()
    threading.setprofile(trace)
    store, hub = dist.HashStore(), Hub(WORLD_SIZE)
    ranks = [
        threading.Thread(target=train, args=(rank, store, hub, options.mode))
        for rank in range(WORLD_SIZE)
    ]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    found = set().union(*(called[thread] for thread in own_threads))
    for what, functions in (("called in one round", found), ("on the stack at send", on_stack)):
        names = {(file, name.split(".<locals>")[0]) for file, name in functions}
        classes = {(file, name.rpartition(".")[0]) for file, name in names if "." in name}
        files = {file for file, _ in names}
        print(f"{what}: {len(names)} functions, {len(classes)} classes, {len(files)} files")
        for file, name in sorted(names) if options.names else ():
            print(f"  {file}: {name}")


if __name__ == "__main__":
    main()
