"""Final weights of small fixed runs, bit for bit: what a change of the code below must not change.

`digests.json` holds a digest of the weights of every rank for each run of `RUNS`, made by the code
of the day it was written. A difference is a change of what users train. If one is meant, say why
in the commit message and write the file anew, on a machine that it was made for:

    GOSSIPGRAD_WRITE_PINS=1 python -m pytest tests/pins

Nothing here depends on time: each rank's gradients are elementwise functions of its weights and of
whole numbers from a seeded generator (no matrix products, no sums, no logarithms), all waits of
these modes are longer than a busy machine takes, and weights are read before the sessions close.
"""

import hashlib
import json
import os
import platform
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import gossipgrad as gg
from gossipgrad.planning import Merge as PlannedGroup
from gossipgrad.planning import Plan
from support.ranks import run_ranks

FILE = Path(__file__).with_name("digests.json")
WRITE = os.environ.get("GOSSIPGRAD_WRITE_PINS") == "1"
STEPS = 10  # on 8 ranks, three periods of three rounds and a part of a fourth
SHAPES = ((7, 5), (33,), (), (3, 4, 5), (1,), (64, 3))
# From the model's last tensor to its first. The times are of no account.
PLAN = Plan(
    groups=(
        PlannedGroup(0, 2, "sparse"),
        PlannedGroup(2, 3, "dense"),
        PlannedGroup(3, 6, "sparse"),
    ),
    finish_seconds=1.0,
    lower_bound_seconds=0.5,
)


class Elementwise(nn.Module):
    """Pulls each parameter to a target of its own; its gradients are exact to the last bit."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        start = drawn(torch.Generator().manual_seed(seed))
        self.pieces = nn.ParameterList(tensor.to(dtype) for tensor in start)

    def forward(self, targets: list[torch.Tensor]) -> torch.Tensor:
        losses = [
            ((p - target.to(p.dtype)) ** 2).sum()
            for p, target in zip(self.pieces, targets, strict=True)
        ]
        return torch.stack(losses).sum()


def drawn(generator: torch.Generator) -> list[torch.Tensor]:
    """A tensor for each parameter; 97 is no power of two, so that arithmetic on them rounds."""
    return [torch.randint(-300, 301, shape, generator=generator) / 97 for shape in SHAPES]


def sgd(parameters, momentum=0.9):
    return torch.optim.SGD(parameters, lr=0.03, momentum=momentum)


def plain_sgd(parameters):
    return sgd(parameters, momentum=0.0)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.03, weight_decay=0.1)


def gossip(world_size, optimizer=sgd, dtype=torch.float32, consensus_after=None, **settings):
    return gg.gossip, world_size, optimizer, dtype, consensus_after, settings


def sparsify(world_size, optimizer=plain_sgd, **settings):
    return gg.sparsify, world_size, optimizer, torch.float32, None, settings


RUNS = {
    "overlap": gossip(2, seed=1, topology="matching"),
    "overlap, 3 ranks, small buckets": gossip(3, seed=2, bucket_bytes=128),
    "overlap, momentum too": gossip(4, seed=3, payload="weights+state", topology="hypercube"),
    "overlap, bf16 wire": gossip(5, seed=4, wire_dtype=torch.bfloat16, topology="matching"),
    "overlap, shared mask": gossip(8, seed=5, compress="shared-mask:0.25", bucket_bytes=256),
    "overlap, bf16 model": gossip(4, seed=6, dtype=torch.bfloat16, bucket_bytes=256),
    "overlap, AdamW, every 2, bf16 wire, consensus": gossip(
        5,
        adamw,
        seed=7,
        payload="weights+state",
        every=2,
        wire_dtype=torch.bfloat16,
        bucket_bytes=300,
        consensus_after=5,
    ),
    "overlap, gradients and weights": gossip(4, seed=8, payload="gradients+weights"),
    "sync, AdamW": gossip(3, adamw, seed=9, mode="sync", payload="weights+state"),
    "sync, average every 4": gossip(
        8, seed=10, mode="sync", average_every=4, topology="hypercube", bucket_bytes=200
    ),
    "sync, every 2, bf16 wire": gossip(
        5, seed=11, mode="sync", every=2, wire_dtype=torch.bfloat16, topology="matching"
    ),
    "sparse, layer by layer": sparsify(2, density=0.2, plan="layerwise"),
    "sparse, corrected": sparsify(4, density=0.1, plan=200, momentum_correction=0.9),
    "sparse, a plan, corrected, by tensor": sparsify(
        2, density=0.15, plan=PLAN, select="per_tensor", momentum_correction=0.8
    ),
    "sparse, a plan": sparsify(4, sgd, density=0.25, plan=PLAN),
}


def here() -> dict[str, str]:
    """What the bits depend on beside the code."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability in ("AVX2", "AVX512"):  # both fuse the same products and sums, "DEFAULT" none
        capability = "AVX2 or AVX512"
    return {
        "torch": torch.__version__.split("+")[0],
        "machine": platform.machine(),
        "cpu_capability": capability,
    }


def digest(model: nn.Module) -> str:
    whole = hashlib.sha256()
    for name, parameter in model.named_parameters():
        whole.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        whole.update(parameter.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return whole.hexdigest()


def run(door, world_size, optimizer_of, dtype, consensus_after, settings) -> list[list[str]]:
    """By rank: a digest inside `consensus()`, if it is asked for, and one after the last step."""
    all_done = threading.Barrier(world_size)

    def rank_main(rank: int, group: gg.Group) -> list[str]:
        model = Elementwise(dtype, seed=rank)  # the session makes all start as rank 0
        optimizer = optimizer_of(model.parameters())
        data = torch.Generator().manual_seed(1000 + rank)
        digests = []
        with door(model, optimizer, process_group=group, **settings) as session:
            for step in range(1, STEPS + 1):
                optimizer.zero_grad()
                model(drawn(data)).backward()
                optimizer.step()
                if step == consensus_after:
                    with session.consensus():
                        digests.append(digest(model))
            if door is gg.gossip:
                session.wait()  # in mode sync weights are mixed as the next forward reads them
            digests.append(digest(model))
            all_done.wait(100)  # one that leaves early would be missed by the others
        return digests

    return run_ranks(world_size, rank_main)


@pytest.mark.parametrize("name", RUNS)
def test_final_weights_are_those_of_the_file(name):
    if WRITE:
        known = json.loads(FILE.read_text()) if FILE.exists() else {}
        digests = {**known.get("digests", {}), name: run(*RUNS[name])}
        ordered = {each: digests[each] for each in RUNS if each in digests}
        FILE.write_text(json.dumps({"made_with": here(), "digests": ordered}, indent=1) + "\n")
        return
    known = json.loads(FILE.read_text())
    if known["made_with"] != here():
        pytest.skip(f"digests were made with {known['made_with']}, this is {here()}")
    assert run(*RUNS[name]) == known["digests"][name]
