import math

import numpy as np
import pytest

from gossipgrad.data._checks import check_whole


@pytest.mark.parametrize("value", ["4", 2.5, 4.0, math.nan, True, None, 0, -3, np.int64(0)])
def test_what_is_no_whole_number_or_too_small_is_named(value):
    with pytest.raises(
        ValueError, match=r"credits is .*, but must be a whole number of at least 1\."
    ) as caught:
        check_whole(1, batch_size=4, credits=value)
    assert repr(value) in str(caught.value)


def test_whole_numbers_of_numpy_are_whole():
    check_whole(0, seed=0, rank=np.int64(3), size=np.uint8(7))
