"""What of the package's names is loaded when it is asked for: not everybody needs it."""

from importlib import import_module
from typing import Any

_ROOMS = {
    "Muon": "muon",
    "SudaSession": "muon",
    "SudaStats": "muon",
    "suda": "muon",
    "advise": "simulate",
    "predict": "simulate",
    "simulate": "simulate",
    "apoptosis": "apoptosis",
    "Neurons": "apoptosis",
    "ShrinkPlan": "apoptosis",
    "ShrinkSession": "apoptosis",
    "rebuild": "apoptosis",
    "shrink": "apoptosis",
    "KLShampoo": "second_order",
    "SOAP": "second_order",
    "Shampoo": "second_order",
    "Refresh": "second_order",
    "Tiers": "second_order",
    "second_order": "second_order",
    "share_roots": "second_order",
    "sparsification": "sparsification",
    "SparseSession": "sparsification",
    "SparseStats": "sparsification",
    "sparsify": "sparsification",
}


def __getattr__(name: str) -> Any:
    """The name of a room, or what a room has under that name."""
    if name not in _ROOMS:
        raise AttributeError(f"module 'gossipgrad' has no attribute {name!r}")
    room = import_module(f"gossipgrad.{_ROOMS[name]}")
    return room if name == _ROOMS[name] else getattr(room, name)
