"""What the tests themselves rest on: shapes are checked at run time."""

import warnings

import numpy as np
import pytest
from beartype import beartype
from jaxtyping import TypeCheckError

from gossipgrad.simulate._model import synchronize


def test_shapes_are_checked():
    assert synchronize(np.array([1.0, 2.0]), 0.5).tolist() == [2.5, 2.5]
    with pytest.raises(TypeCheckError, match="end"):
        synchronize(np.zeros((2, 2)), 0.5)


def test_checks_of_types_leave_the_filters_of_warnings_alone(monkeypatch):
    def swap(*_):
        raise AssertionError("threads that do so at once lose the warnings of each other")

    monkeypatch.setattr(warnings.catch_warnings, "__enter__", swap)

    @beartype
    def double(number: int) -> int:
        return 2 * number

    assert double(2) == 4
