"""Neuron apoptosis in a run: when it happens, and what became of it."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

import gossipgrad as gg

from ._config import TrainConfig
from ._job import Job, to_device
from .strategies import RunningStrategy

_EVENTS = 10  # in the first of 24 parts of the run: what goes early saves most
_PARTS = 24
_SAMPLES = 2048  # of each rank that are looked at before an event


def shrink(
    config: TrainConfig,
    job: Job,
    strategy: RunningStrategy,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    total_steps: int,
    device: torch.device,
) -> gg.ShrinkSession | None:
    """Lets the replicas shrink from now on, if the run is to; a collective then."""
    if config.apoptosis is None:
        return None
    how = strategy.shrinking()
    batches = -(-_SAMPLES // config.batch_size)
    every = max(1, total_steps // _PARTS, min(batches, total_steps // 4))
    events = min(_EVENTS, total_steps // every)
    if events < 1:
        strategy.notes.append("apoptosis: the run is too short: widths stay")
        return None
    x, _ = job.test_samples().batch(torch.arange(2))
    return gg.shrink(
        model,
        optimizers,
        example_input=to_device(x, device),
        budget=config.apoptosis,
        every=every,
        events=events,
        batches=min(batches, every),
        start=0,
        **how,
    )


def note_on_widths(shrinking: gg.ShrinkSession | None) -> list[str]:
    """What became of the widths, for the summary."""
    if shrinking is None:
        return []
    stats, widths = shrinking.stats(), shrinking.widths()
    layers = ", ".join(f"{name} {width}" for name, width in widths.items()) or "none may shrink"
    return [
        f"apoptosis: {stats.parameters_before:,} parameters became {stats.parameters:,} in "
        f"{stats.events} events; widths now: {layers}"
    ]
