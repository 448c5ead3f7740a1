"""How far the outputs of replicas are apart: what each predicts for the same batch."""

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from gossipgrad.comm import local

__all__ = ["digest_of", "jensen_shannon", "predict"]


def digest_of(batch: Tensor) -> str:
    """Equal where two batches are, bit for bit."""
    held = batch.detach().contiguous().cpu()
    found = hashlib.sha256(f"{held.dtype} {tuple(held.shape)}".encode())
    found.update(held.reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def predict(model: nn.Module, batch: Tensor) -> Tensor:
    """The model's log-probabilities, shape `(rows, classes)`, in fp64; the model is as it was.

    Raises:
        ValueError: It returns no tensor of logits, nor something with `logits`.
    """
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
    return logits.flatten(0, -2).double().log_softmax(-1).cpu()


def jensen_shannon(mean: Tensor, entropies: Tensor) -> float:
    """The distance of Jensen and Shannon of several distributions a row, mean over the rows.

    Args:
        mean: Mean of their probabilities, shape `(rows, classes)`.
        entropies: Mean of their entropies, natural logarithm, shape `(rows,)`.
    """
    divergence = torch.special.entr(mean).sum(-1) - entropies
    return divergence.clamp_min(0).sqrt().mean().item()
