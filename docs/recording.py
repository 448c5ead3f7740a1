"""Records some steps of a real session on a slow network, for the timeline figure."""

import statistics
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gossipgrad as gg
from gossipgrad.comm import Faults, FaultyTransport, TCPTransport, Transport
from gossipgrad.report import Trace

WORLD_SIZE = 2
STEPS = 40
SHOWN = 3
FORWARD_SECONDS, BACKWARD_SECONDS = 0.008, 0.016  # an accelerator's: Python only waits for it
DELAY_SECONDS = 0.015
NAMES = {"forward": "compute", "backward": "compute", "update": "compute", "snapshot": "mix"}
ON_STEP = ("compute", "wait", "mix")


def record() -> dict[str, Any]:
    """A few steps of rank 0 in two modes, every message delayed by script."""
    torch.set_num_threads(1)
    modes = {mode: shown(train(mode)) for mode in ("overlap", "sync")}
    setting = (
        f"{WORLD_SIZE} ranks in threads, TCP, each message {1e3 * DELAY_SECONDS:g} ms late; "
        f"forward waits {1e3 * FORWARD_SECONDS:g} ms and backward {1e3 * BACKWARD_SECONDS:g} ms"
    )
    return {"command": "python docs/figures.py --record", "setting": setting, "modes": modes}


def train(mode: str) -> list[dict[str, Any]]:
    """Trains both ranks and returns the spans of rank 0."""
    store, traces = dist.HashStore(), [Trace(rank) for rank in range(WORLD_SIZE)]
    threads = [
        threading.Thread(target=rank_main, args=(rank, store, mode, traces[rank]))
        for rank in range(WORLD_SIZE)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [
        {"name": NAMES.get(name, name), "start": start, "end": end}
        for name, start, end, _ in traces[0]._spans
    ]


def rank_main(rank: int, store: dist.Store, mode: str, trace: Trace) -> None:
    """What a user's script does, with spans around its parts."""
    faults = Faults()
    for r in range(WORLD_SIZE):
        for t in range(STEPS + 1):
            faults.delay(rank=r, round=t, seconds=DELAY_SECONDS)

    def slow(group: gg.Group) -> Transport:
        return FaultyTransport(TCPTransport(group), faults)

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x = torch.randn(16, 256)
    group = gg.Group(store, rank, WORLD_SIZE)
    with gg.gossip(
        model, optimizer, mode=mode, process_group=group, transport=slow, recorder=trace
    ):
        for _ in range(STEPS):
            with trace.measure("forward"):
                loss = model(x).square().mean()
                time.sleep(FORWARD_SECONDS)
            with trace.measure("backward"):
                loss.backward()
                time.sleep(BACKWARD_SECONDS)
            optimizer.step()
            optimizer.zero_grad()


def shown(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps whose length is nearest to the median, in ms from their start."""
    starts = [s["start"] for i, s in enumerate(spans) if is_forward(spans, i)]
    lengths = [starts[i + SHOWN] - starts[i] for i in range(5, len(starts) - SHOWN)]
    usual = statistics.median(lengths)
    first = min(range(len(lengths)), key=lambda i: abs(lengths[i] - usual)) + 5
    begin, end = starts[first], starts[first + SHOWN]
    return [
        {
            "name": span["name"],
            "start_ms": round(1e3 * (max(span["start"], begin) - begin), 2),
            "end_ms": round(1e3 * (min(span["end"], end) - begin), 2),
        }
        for span in spans
        if span["end"] > begin and span["start"] < end
    ]


def is_forward(spans: list[dict[str, Any]], index: int) -> bool:
    """Whether this span begins a step: compute that no compute precedes."""
    before = [span["name"] for span in spans[:index] if span["name"] in ON_STEP]
    return spans[index]["name"] == "compute" and before[-1:] != ["compute"]
