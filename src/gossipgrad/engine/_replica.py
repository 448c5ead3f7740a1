"""A replica: the user's model and optimizers, and the set of parameters that they train."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossipgrad.comm import local, parameters_of, trained_parameters, widened
from gossipgrad.engine._claims import Claim
from gossipgrad.errors import AgreementError, EvictedError, GossipError, ReplicaChangedError

__all__ = ["Replica", "retried"]

T = TypeVar("T")

_TRIES = 4  # ranks may be lost in the middle of a collective
_WAY_OUT = "Call session.broadcast_() on every rank to make all replicas rank 0's"


class Replica:
    """The model and optimizers of one session.

    Notices loaded optimizers, and another set of trained parameters. Other code may write weights:
    a write reaches the other ranks like an update.

    Args:
        model: The model.
        optimizers: In the order in which they step.
        call: The function that makes the session, for messages.

    Attributes:
        trained: The parameters that the optimizers train, by name, as of the last `accept`.
        version: How often parameters have got other shapes, or another set is trained.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], *, call: str) -> None:
        self.model = model
        self.optimizers = list(optimizers)
        self.version = 0
        self.trained: dict[str, nn.Parameter] = {}
        self._claim = Claim(call)
        self._owned: list[int] = []
        self._shapes: dict[str, torch.Size] = {}
        self._loaded: list[str] = []
        loaded = self._loaded  # so that hooks reference only this list
        self._handles = []
        try:
            for optimizer in self.optimizers:
                self._handles.append(
                    optimizer.register_load_state_dict_post_hook(
                        lambda optimizer: loaded.append(type(optimizer).__name__)
                    )
                )
            self.accept()
        except BaseException:
            self.close()
            raise

    @torch.no_grad()
    def accept(self) -> None:
        """Accept the current set of trained parameters.

        Raises:
            ValueError: A parameter is in another session that must have it alone.
        """
        trained = trained_parameters(self.model, self.optimizers)
        self._claim.take(trained)
        self._loaded.clear()
        self.trained = trained
        self._shapes = {name: parameter.shape for name, parameter in trained.items()}
        self._owned = self._owned_now()

    @contextmanager
    def accepting(self) -> Iterator[None]:
        """Use the current set of trained parameters inside; restore the former one on an error.

        Call `accept` after the writes inside.
        """
        before = self.trained, self._shapes, self._owned, list(self._loaded)
        self.accept()
        try:
            yield
        except BaseException:
            self.trained, self._shapes, self._owned, self._loaded[:] = before
            self._claim.take(self.trained)
            raise

    @torch.no_grad()
    def checksums(self) -> list[Tensor]:
        """Return two numbers for each trained parameter, equal if its values are; copies none."""
        wide = (local(p).to(widened(p.dtype)) for p in self.trained.values())
        return [torch.stack((values.sum(), values.norm())) for values in wide]

    def check(self) -> None:
        """Check that no optimizer was loaded, and that the set of trained parameters is the same.

        Raises:
            ReplicaChangedError: If not; it names the change.
        """
        self.check_loaded()
        if (change := self.set_change()) is not None:
            raise ReplicaChangedError(
                f"{change}. Call session.average_() on every rank before the set changes, so that "
                "nothing is lost, and session.broadcast_() on every rank after it"
            )

    def check_loaded(self) -> None:
        """Check that no optimizer has loaded another state.

        Raises:
            ReplicaChangedError: If one has; it is named.
        """
        if self._loaded:
            raise ReplicaChangedError(
                f"{self._loaded[0]}.load_state_dict was called inside a session. {_WAY_OUT}"
            )

    def has_other_shapes(self) -> bool:
        """Whether a trained parameter has another shape than when it was accepted."""
        return any(p.shape != self._shapes[name] for name, p in self.trained.items())

    def set_change(self) -> str | None:
        """Describe how the set of trained parameters differs from the session's, None if equal.

        Parameters are compared by identity: one that is frozen for a while still belongs to the
        session. One that was frozen as the session began is new when it is not any more.
        """
        known = {id(p) for p in self.trained.values()}
        held = [p for o in self.optimizers for p in parameters_of(o)]
        is_thawed = any(p.requires_grad and id(p) not in known for p in held)
        if self._owned == self._owned_now() and not is_thawed:
            return None
        now, before = trained_parameters(self.model, self.optimizers), self.trained
        new = [name for name in now if now[name] is not before.get(name)]
        gone = [name for name, p in before.items() if not any(p is each for each in held)]
        what = [f"new: {', '.join(new)}"] if new else []
        what += [f"gone: {', '.join(gone)}"] if gone else []
        return (
            "the parameters that the optimizers train have changed (add_param_group, "
            f"requires_grad): {'; '.join(what) or 'in their order'}"
        )

    def adopt(self, average: Callable[[], None]) -> None:
        """Call `average`, a collective that accepts another set, until it has if the set changed.

        Raises:
            AgreementError: On every rank, if one's set is another.
            GossipError: The ranks did not meet.
        """
        if self.set_change() is not None:
            retried(lambda: self.set_change() is None or average())

    def shapes(self) -> dict[str, list[int]]:
        """Return the shapes of parameters and buffers by name."""
        model = self.model
        return {n: list(t.shape) for n, t in (*model.named_parameters(), *model.named_buffers())}

    def reshard(self) -> None:
        """Free full parameters that FSDP2 has gathered and would reuse; local.

        After a forward pass without a backward pass, the root module keeps them for the next one.
        They are copies: after the shards are written, the next pass must gather them again.
        """
        loaded = sys.modules.get("torch.distributed.fsdp")  # importing it takes long
        if loaded is not None:
            for module in self.model.modules():
                if isinstance(module, loaded.FSDPModule):
                    module.reshard()

    def close(self) -> None:
        """Remove the hooks, and release the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._claim.release()

    def _owned_now(self) -> list[int]:
        return [id(p) for o in self.optimizers for p in parameters_of(o)]


def retried(attempt: Callable[[], T]) -> T:
    """Return the result of an attempt of all ranks; some may be lost in the middle of it."""
    for _ in range(_TRIES - 1):
        try:
            return attempt()
        except (AgreementError, EvictedError, ReplicaChangedError):
            raise
        except GossipError:
            pass
    return attempt()
