"""What the tests themselves rest on: types and shapes are checked at run time."""

import numpy as np
import pytest
from beartype.roar import BeartypeCallHintParamViolation
from jaxtyping import TypeCheckError

from gossipgrad.comm._place import place
from gossipgrad.simulate._setting import together


def test_types_are_checked():
    with pytest.raises(BeartypeCallHintParamViolation, match="generation"):
        place("first", 1)


def test_shapes_are_checked():
    assert together(np.array([1.0, 2.0]), 0.5).tolist() == [2.5, 2.5]
    with pytest.raises(TypeCheckError, match="end"):
        together(np.zeros((2, 2)), 0.5)
