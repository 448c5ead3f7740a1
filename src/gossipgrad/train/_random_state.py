"""Random numbers of this process: where their generators are."""

import random
from typing import Any

import numpy as np
import torch


def seed_rank(seed: int, rank: int) -> None:
    """Gives a rank random numbers of its own, the same in every run with this seed."""
    drawn = [int(word) for word in np.random.SeedSequence((seed, rank)).generate_state(3)]
    torch.manual_seed(drawn[0])
    random.seed(drawn[1])
    np.random.seed(drawn[2])  # noqa: NPY002  (whatever user code draws from)


def random_state(device: torch.device) -> dict[str, Any]:
    """Where the generators of torch, Python and numpy are, and that of `device` if it has one."""
    return {
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": _plain(np.random.get_state(legacy=True)),  # noqa: NPY002  (as user code may)
    }


def _plain(state: Any) -> tuple[Any, ...]:
    kind, keys, *others = state
    return kind, torch.from_numpy(keys.astype(np.int64)), *others


def load_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Bring them where `random_state` found them."""
    torch.set_rng_state(state["torch"])
    if state["device"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["device"], device)
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *others = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *others))  # noqa: NPY002
