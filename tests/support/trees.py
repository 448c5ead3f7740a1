"""States to save, and whether two are the same to the last bit."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["assert_same", "bits", "replica"]


def assert_same(found: Any, wanted: Any, where: str = "") -> None:
    """Of the same types all through, with the same bits, in the same order."""
    assert type(found) is type(wanted), f"{where}: {found!r} is not {wanted!r}"
    if isinstance(wanted, Tensor):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), where
        assert bits(found) == bits(wanted), f"{where}: {(found - wanted).abs().max():.3g} apart"
    elif isinstance(wanted, np.ndarray):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), where
        assert found.tobytes() == wanted.tobytes(), where
    elif isinstance(wanted, dict):
        assert [(type(key), key) for key in found] == [(type(key), key) for key in wanted], where
        for key in wanted:
            assert_same(found[key], wanted[key], f"{where}/{key}")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), where
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_same(one, other, f"{where}/{number}")
    else:  # floats by their text: -0.0 is not 0.0, and NaN is itself
        assert repr(found) == repr(wanted), f"{where}: {found!r} is not {wanted!r}"


def bits(tensor: Tensor) -> bytes:
    """What it holds, told apart where `==` does not (0 and -0) and alike where it is not (NaN)."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype is torch.complex128:
        tensor = torch.view_as_real(tensor)
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(sizes[tensor.element_size()]).numpy().tobytes()


def replica(value: float, size: int = 4) -> dict[str, Any]:
    """The state of a rank whose every number is `value`."""
    return {
        "model": {"w": torch.full((size,), float(value))},
        "epoch": int(value),
        "note": f"{value}",
    }
