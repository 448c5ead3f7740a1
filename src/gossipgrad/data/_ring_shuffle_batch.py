"""What a ring shuffle hands out, and what a DataLoader makes of it."""

from collections.abc import Sequence
from typing import Any

from torch.utils._pytree import register_pytree_node
from torch.utils.data._utils.collate import default_collate_fn_map


class RowBatch(tuple):
    """A batch of rows, one tensor for each of the shard's.

    A `DataLoader` that was not told `batch_size=None` makes batches of what it gets. Of this it
    makes none: with its default of one it hands the batch on as it is, with more it is refused.
    """

    __slots__ = ()


def _handed_on(batches: Sequence[RowBatch], *, collate_fn_map: Any = None) -> RowBatch:
    if len(batches) > 1:
        raise ValueError(
            f"a DataLoader would make one batch of {len(batches)} that a RingShuffle has made "
            "already: use DataLoader(shuffle, batch_size=None), and say how large batches are in "
            "RingShuffle(..., batch_size=...). No row is lost."
        )
    return batches[0]


default_collate_fn_map[RowBatch] = _handed_on
register_pytree_node(
    RowBatch,
    lambda batch: (list(batch), None),
    lambda parts, _: RowBatch(parts),
    serialized_type_name="gossipgrad.data.RowBatch",
)
