"""States to save, and whether two are the same to the last bit."""

import struct
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["assert_same", "bits", "replica"]


def assert_same(found: Any, wanted: Any) -> None:
    """Of the same types all through, with the same bits, in the same order."""
    assert type(found) is type(wanted), (found, wanted)
    if isinstance(wanted, Tensor):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert bits(found) == bits(wanted)
    elif isinstance(wanted, np.ndarray | np.generic):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert found.tobytes() == wanted.tobytes()
    elif isinstance(wanted, float):
        assert struct.pack("d", found) == struct.pack("d", wanted)
    elif isinstance(wanted, dict | OrderedDict | Counter):
        assert list(map(type, found)) == list(map(type, wanted))
        assert list(found) == list(wanted)
        for key in wanted:
            assert_same(found[key], wanted[key])
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    else:
        assert found == wanted


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
