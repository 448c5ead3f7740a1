"""The ring shuffle of GossipGraD on p shards in one process, in step.

Letters: p ranks, rank i with shard S_i of n_i rows, batch size b, t the step.

Rule, from the authors' data layer (arXiv:1803.05880):
    1. Rank i trains on a batch B_i of S_i.  (their `shuffle_row_`)
    2. It sends B_i to rank i - 1 and receives B_{i+1} from rank i + 1.  (Isend, Irecv)
    3. B_{i+1} takes the slots of B_i before the next step.  (End)
So after one epoch a shard has moved on by one rank, and after p epochs each rank has seen all rows.

Deviations: (1) The order of a shard is drawn again each epoch, from seed, epoch and rank; theirs is
that of the slots. (2) Shards may be uneven: on every link the first rows of the batches travel, as
many as in the smallest batch of the step.
"""

from collections.abc import Sequence

import numpy as np

from ._rows import Flow, num_batches


class RingReference:
    """All ranks of a ring shuffle whose rows always arrive in time.

    Args:
        shards: The rows of each rank, by number.
        batch_size: Rows of a batch.
        seed: Of the orders.

    Example:
        >>> ring = RingReference([[0, 1], [2, 3]], batch_size=2, seed=0)
        >>> first, second = ring.step(), ring.step()
        >>> [sorted(rows) for rows in (*first, *second)]
        [[0, 1], [2, 3], [1, 3], [0, 2]]
    """

    def __init__(self, shards: Sequence[Sequence[int]], *, batch_size: int, seed: int) -> None:
        self.shards = [list(rows) for rows in shards]
        self.flow = Flow([*map(len, shards)], batch_size=batch_size, drop_last=False)
        self.batch_size, self.seed, self.t = batch_size, seed, 0

    def step(self) -> list[list[int]]:
        """Return the batch of each rank in step t, and move its rows on."""
        p, count = len(self.shards), self.flow.rows(self.t)
        slots = [self._slots(i) for i in range(p)]
        batches = [[self.shards[i][slot] for slot in slots[i]] for i in range(p)]
        for i in range(p):  # rule 3
            for slot, row in zip(slots[i][:count], batches[(i + 1) % p], strict=False):
                self.shards[i][slot] = row
        self.t += 1
        return batches

    def _slots(self, i: int) -> list[int]:
        n = len(self.shards[i])
        batches = num_batches(n, self.batch_size, drop_last=False)
        epoch, batch = divmod(self.t, batches)
        order = np.random.default_rng((self.seed, epoch, i)).permutation(n)
        start = batch * self.batch_size
        stop = n if batch == batches - 1 else start + self.batch_size
        return order[start:stop].tolist()
