"""A worker of `benchmarks.before_after`: contestants by public doors that both checkouts have.

It runs on the gossipgrad and the benchmarks of whichever checkout `PYTHONPATH` names first.
"""

import torch

import gossipgrad as gg
from benchmarks.network._contestants import Alone, Contestant, Gossip, Surroundings
from benchmarks.network._worker import Worker, main

DENSITY = 0.01
GROUP_BYTES = 25 << 20  # at full size, as buckets of DistributedDataParallel


class Sparsified(Contestant):
    """One fixed plan of both checkouts: groups by bytes, all sparse, nothing measured."""

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__(surroundings)
        # Selecting among zeros, the replay's gradients, costs ten times what it does in training.
        generator = torch.Generator().manual_seed(0)
        self._noise = torch.randn(self.model._zeros.shape, generator=generator)
        self._session = gg.sparsify(
            self.model,
            self.optimizer,
            density=DENSITY,
            plan=surroundings.bucket_bytes(GROUP_BYTES),
            methods=("sparse",),
        )

    def step(self) -> None:
        self.model._zeros.copy_(self._noise)
        super().step()

    def close(self) -> None:
        self._session.close()


KINDS = {
    "no communication": Alone,
    "overlap": Gossip,
    "overlap, bf16 wire": lambda s: Gossip(s, wire_dtype=torch.bfloat16),
    "stale": lambda s: Gossip(s, "stale"),
    "sparsify": Sparsified,
}


class BeforeAfterWorker(Worker):
    """Makes these contestants, and says whose code it runs."""

    def origin(self) -> str:
        """The file of the package that was imported."""
        return gg.__file__

    def compete(self, name: str, surroundings: Surroundings) -> Contestant:
        """A contestant by its name."""
        return KINDS[name](surroundings)


if __name__ == "__main__":
    main(BeforeAfterWorker)
