"""Flows that share an uplink: each gets an equal part of it for as long as they overlap."""

import numpy as np
from jaxtyping import Float, Int

__all__ = ["shared_finish"]

Times = Float[np.ndarray, " flow"]


def shared_finish(
    start: Times,
    uplink: Int[np.ndarray, " flow"],
    *,
    size_bytes: float,
    uplink_bytes_per_second: float,
    flow_bytes_per_second: float,
) -> Times:
    """When flows of one size are through, of which those with the same uplink share it.

    At each moment every flow on an uplink moves at an equal part of its rate, but not above its
    own. Flows of one size end in the order in which they began, so a count of those that came and
    those that left tells who shares: all uplinks go from event to event together.

    Args:
        start: When each flow begins.
        uplink: Which uplink it takes, any numbers.
        size_bytes: Of each flow.
        uplink_bytes_per_second: Of each uplink.
        flow_bytes_per_second: What a flow has alone.

    Returns:
        When the last byte of each flow is through.
    """
    if start.size == 0:
        return start.copy()
    order = np.lexsort((start, uplink))
    _, first, counts = np.unique(uplink[order], return_index=True, return_counts=True)
    uplinks, most = np.arange(counts.size), int(counts.max())
    column = np.arange(start.size) - np.repeat(first, counts)
    row = np.repeat(uplinks, counts)
    starts = np.full((counts.size, most + 1), np.inf)  # one more: no flow comes after the last
    starts[row, column] = start[order]
    entered = np.zeros((counts.size, most + 1))
    ends = np.zeros((counts.size, most + 1))
    came = np.zeros(counts.size, dtype=np.int64)
    left = np.zeros(counts.size, dtype=np.int64)
    now = starts[:, 0].copy()
    served = np.zeros(counts.size)  # bytes that a flow which is there throughout has moved
    for _ in range(2 * most):
        present = came - left
        busy = present > 0
        rate = np.minimum(flow_bytes_per_second, uplink_bytes_per_second / np.maximum(present, 1))
        arrival = starts[uplinks, came]
        to_go = entered[uplinks, left] + size_bytes - served
        departure = np.where(busy, now + to_go / rate, np.inf)
        leaves = departure <= arrival
        moment = np.where(leaves, departure, arrival)
        live = np.isfinite(moment)
        span = np.where(live & busy, moment - now, 0.0)
        served += rate * span
        now = np.where(live, moment, now)
        goes, comes = live & leaves, live & ~leaves
        # What is left over of a flow that ends now is rounding: it is taken as nothing.
        served[goes] = (entered[uplinks, left] + size_bytes)[goes]
        ends[uplinks[goes], left[goes]] = now[goes]
        left[goes] += 1
        entered[uplinks[comes], came[comes]] = served[comes]
        came[comes] += 1
    finish = np.empty_like(start)
    finish[order] = ends[row, column]
    return finish
