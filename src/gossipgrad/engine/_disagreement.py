"""The disagreement of replicas: the distance of their predictions for one batch."""

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from gossipgrad.comm import local
from gossipgrad.engine._averaging import Averaging
from gossipgrad.engine._replica import Replica

__all__ = ["measure_disagreement"]


def measure_disagreement(replica: Replica, averaging: Averaging, batch: Tensor) -> float:
    """See `Session.disagreement`; a collective."""
    if len({*averaging.agree(_digest(batch))}) > 1:
        raise ValueError(
            "disagreement(batch) compares what replicas predict for one batch, and the ranks have "
            "different ones: take the same rows on every rank, such as the first of the test set"
        )
    try:
        p = _predict(replica.model, batch)
    finally:
        replica.reshard()
    mean, entropies = p, torch.special.entr(p).sum(-1)
    averaging.mean_([mean, entropies])  # in place
    divergence = torch.special.entr(mean).sum(-1) - entropies
    return divergence.clamp_min(0).sqrt().mean().item()


def _digest(batch: Tensor) -> str:
    """Return a digest that is equal iff two batches are, bit for bit."""
    held = batch.detach().contiguous().cpu()
    found = hashlib.sha256(f"{held.dtype} {tuple(held.shape)}".encode())
    found.update(held.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _predict(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the model's probabilities, shape `(rows, classes)`, in fp64."""
    modes = [(module, module.training) for module in model.modules()]
    devices = {local(p).device for p in model.parameters() if local(p).device.type == "cuda"}
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=list(devices)):
            found: Any = model(batch)
    finally:
        for module, was_training in modes:
            module.training = was_training
    logits = getattr(found, "logits", found)
    if not isinstance(logits, Tensor) or logits.ndim < 2 or not logits.is_floating_point():
        raise ValueError(
            "disagreement(batch) compares probabilities of classes, and the model returned "
            f"{type(found).__name__}: it must return logits, classes last, or have them in .logits"
        )
    return logits.flatten(0, -2).double().softmax(-1).cpu()
