"""Dealing what travels into sections: weights, optimizer state, gradients; one a device."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from gossipgrad.comm import Part, all_parameters, local, trained_parameters
from gossipgrad.compression import SharedMask
from gossipgrad.decentralized._masked_section import MaskedSection
from gossipgrad.decentralized._section import Section
from gossipgrad.decentralized._settings import (
    Gradients,
    GradientsAndWeights,
    Settings,
    WeightsAndState,
)
from gossipgrad.decentralized._tensors import (
    Entry,
    gradient_entries,
    largest_piece_bytes,
    state_entries,
    weight_entries,
)

__all__ = ["Sections"]


class Sections:
    """The sections of a session's payload, and the numbering of their buckets.

    Attributes:
        weights: The trained parameters; there even when only gradients travel, for averages.
        state: The optimizers' state, if the payload has it.
        gradients: The gradients, if the payload has them.
        gradient_bytes: Of one step's gradients, whether they travel or not.
        largest_piece_bytes: Of what could travel if all parameters were trained, at most.

    Raises:
        ValueError: If something that travels is complex, sparse or of a type without average.
        GossipError: If it cannot be found out what state an optimizer keeps.
    """

    @torch.no_grad()
    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], settings: Settings
    ) -> None:
        self._settings = settings
        self._count = 0
        parameters = trained_parameters(model, optimizers)
        if not parameters:
            raise ValueError(
                "the optimizers train no parameter (all are frozen, or there are none): gossip has "
                "nothing to mix"
            )
        payload = settings.payload
        self.weights = self._make(weight_entries(parameters), of_weights=True)
        every = all_parameters(model, optimizers).values()
        self.largest_piece_bytes = largest_piece_bytes(
            every, settings.bucket_bytes, settings.wire_dtype
        )
        self.gradient_bytes = sum(local(p).nbytes for p in parameters.values())
        self.state: list[Section] = []
        self.gradients: list[Section] = []
        if isinstance(payload, WeightsAndState):
            self.state = self._make(state_entries(parameters, optimizers))
        if isinstance(payload, Gradients | GradientsAndWeights):
            self.gradients = self._make(gradient_entries(parameters))

    @property
    def all(self) -> list[Section]:
        """Every section, in the order of their buckets."""
        return [*self.weights, *self.state, *self.gradients]

    @property
    def parts(self) -> list[Part]:
        """The channel's plan."""
        return [part for section in self.all for part in section.parts]

    def of_round(self, round: int) -> list[Section]:
        """What is mixed in a round: weights, and state when it is due."""
        payload = self._settings.payload
        with_state = isinstance(payload, WeightsAndState) and round % payload.every == 0
        return [*self.weights, *self.state] if with_state else self.weights

    def _make(self, entries: Sequence[Entry], *, of_weights: bool = False) -> list[Section]:
        settings = self._settings
        by_device: dict[torch.device, list[Entry]] = {}
        for entry in entries:
            pieces = entry.pieces(settings.bucket_bytes)
            by_device.setdefault(entry.parameter.device, []).extend(pieces)
        sections = []
        for members in by_device.values():
            common = {
                "first_bucket": self._count,
                "bucket_bytes": settings.bucket_bytes,
                "wire_dtype": settings.wire_dtype,
                "snapshots": settings.snapshots,
            }
            section: Section
            if isinstance(settings.compress, SharedMask):
                section = MaskedSection(
                    members, **common, mask=settings.compress, seed=settings.seed
                )
            else:
                section = Section(members, **common, of_weights=of_weights)
            self._count += len(section.plan.buckets)
            sections.append(section)
        return sections
