"""Work on the next items while the present one is used."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def made_ahead(
    make: Callable[[Item], Result], items: Iterable[Item], *, threads: int
) -> Iterator[Result]:
    """`make(item)` of every item, in their order; the same results whatever `threads` is.

    Args:
        make: Must bear being called from several threads at once.
        items: Gone through as results are taken, up to `threads` items ahead.
        threads: How many work ahead; 0: each result is made when it is asked for. They end with
            the iterator, after what they are at.
    """
    if threads == 0:
        yield from map(make, items)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="gossipgrad-data")
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(make, item))
            if len(pending) > threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
