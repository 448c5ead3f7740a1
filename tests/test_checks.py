"""What the tests themselves rest on: shapes are checked at run time."""

import warnings

import numpy as np
import pytest
from beartype import beartype
from jaxtyping import TypeCheckError

from gossipgrad.simulate import Workers


def test_shapes_are_checked():
    assert Workers().pace(np.array([1.0, 2.0]), 0).tolist() == [1.0, 2.0]
    with pytest.raises(TypeCheckError, match="constant"):
        Workers().pace(np.zeros((2, 2)), 0)


def test_checks_of_types_leave_the_filters_of_warnings_alone(monkeypatch):
    def swap(*_):
        raise AssertionError("threads that do so at once lose the warnings of each other")

    monkeypatch.setattr(warnings.catch_warnings, "__enter__", swap)

    @beartype
    def double(number: int) -> int:
        return 2 * number

    assert double(2) == 4
