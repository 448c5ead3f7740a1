import threading

import pytest

from gossipgrad.data import made_ahead


def data_threads():
    return [thread for thread in threading.enumerate() if "gossipgrad-data" in thread.name]


@pytest.mark.parametrize("threads", [0, 1, 3, 20])
def test_results_come_in_order(threads):
    assert list(made_ahead(lambda item: item**2, range(10), threads=threads)) == [
        item**2 for item in range(10)
    ]
    assert not data_threads()


def test_works_so_far_ahead_and_no_farther():
    made, third = [], threading.Event()

    def make(item):
        made.append(item)
        if len(made) == 3:
            third.set()
        return item

    results = made_ahead(make, range(10), threads=2)
    assert next(results) == 0
    assert third.wait(60)
    assert sorted(made) == [0, 1, 2]
    results.close()
    assert not data_threads()


@pytest.mark.parametrize("threads", [0, 2])
def test_error_comes_in_its_place(threads):
    def make(item):
        return 6 // (3 - item)

    results = made_ahead(make, range(10), threads=threads)
    assert [next(results), next(results), next(results)] == [2, 3, 6]
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert not data_threads()
