"""A replica: the user's model and optimizers, and checks that only the session changes them."""

import sys
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from gossipgrad.comm import is_sharded, local, parameters_of, trained_parameters
from gossipgrad.engine._claims import Claim
from gossipgrad.engine._surgery import Surgery, operate
from gossipgrad.errors import ReplicaChangedError

__all__ = ["Replica"]

_WAY_OUT = (
    "Call session.broadcast_() on every rank to make all replicas rank 0's, or "
    "session.accept_changes() on this rank if the change is meant to be mixed in"
)


class Replica:
    """The model and optimizers of one session; detects changes outside of it.

    Detects in-place changes by torch's version counters, and new storage by its address; not writes
    through `.data` into the same storage.

    Args:
        model: The model.
        optimizers: In the order in which they step.
        door: The function that makes the session, for messages.

    Attributes:
        trained: The parameters that the optimizers train, by name, as of the last `accept`.
        version: Number of applied surgeries.
        surgeries: The applied surgeries, in order.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], *, door: str) -> None:
        self.model = model
        self.optimizers = list(optimizers)
        self.version = 0
        self.surgeries: list[Surgery] = []
        self.trained: dict[str, nn.Parameter] = {}
        self._claim = Claim(door)
        self._is_plain = True  # no sharded or sparse parameter: most models
        self._owned: list[tuple[int, bool]] = []
        self._marks: list[tuple[int, int]] = []
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
        self._is_plain = all(
            p.layout is torch.strided and not is_sharded(p) for p in trained.values()
        )
        self._owned = self._owned_now()
        self.note()

    @contextmanager
    def accepting(self) -> Iterator[None]:
        """Use the current set of trained parameters inside; restore the former one on an error.

        Call `accept` after the writes inside.
        """
        before = self.trained, self._is_plain, self._owned, self._marks, list(self._loaded)
        self.accept()
        try:
            yield
        except BaseException:
            self.trained, self._is_plain, self._owned, self._marks, self._loaded[:] = before
            self._claim.take(self.trained)
            raise

    @torch.no_grad()
    def note(self) -> None:
        """Record the weights' versions after a change by the session."""
        self._marks = self._marks_now()

    @torch.no_grad()
    def note_mixed(self, mix: Callable[[], None], names: Container[str]) -> None:
        """Mix some parameters and record their versions; earlier changes stay detectable."""
        before = self._marks_now()
        mix()
        for place, (name, mark) in enumerate(zip(self.trained, self._marks_now(), strict=True)):
            if name in names and before[place] == self._marks[place]:
                self._marks[place] = mark

    @torch.no_grad()
    def touched(self) -> list[str]:
        """Return the names of parameters that changed since `note`."""
        now = self._marks_now()
        if now == self._marks:
            return []
        marks = zip(self.trained, now, self._marks, strict=True)
        return [name for name, mark, before in marks if mark != before]

    def check(self, is_as_sent: Callable[[], bool] = lambda: False) -> None:
        """Check that only the session changed weights since `note`.

        Args:
            is_as_sent: Called if weights were written; returns whether their values are unchanged.

        Raises:
            ReplicaChangedError: If other changes were made; it names them.
        """
        self.check_set()
        names = self.touched()
        if names and not is_as_sent():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ReplicaChangedError(
                f"parameter {names[0]!r}{more} changed outside optimizer.step() (load_state_dict, "
                f"re-initialisation, ...). {_WAY_OUT}"
            )

    def check_set(self) -> None:
        """Check that the optimizers still train the same parameters, from the same state.

        Raises:
            ReplicaChangedError: If not; it names the differences.
        """
        if self._loaded:
            raise ReplicaChangedError(
                f"{self._loaded[0]}.load_state_dict was called inside a session. {_WAY_OUT}"
            )
        if self._owned == self._owned_now():
            return
        now, before = trained_parameters(self.model, self.optimizers), self.trained
        new = [name for name in now if now[name] is not before.get(name)]
        gone = [name for name in before if name not in now]
        what = [f"new: {', '.join(new)}"] if new else []
        what += [f"gone: {', '.join(gone)}"] if gone else []
        raise ReplicaChangedError(
            "the parameters that the optimizers train have changed (add_param_group, "
            f"requires_grad): {'; '.join(what) or 'in their order'}. Call session.broadcast_() on "
            "every rank to continue with the new set"
        )

    def apply(self, surgery: Surgery) -> None:
        """Change shapes in place, with optimizer state, gradients and buffers; local.

        Raises:
            ValueError: If it does not fit; nothing is changed then.
        """
        operate(self.model, self.optimizers, surgery)
        self.surgeries.append(surgery)
        self.version += 1
        self.note()

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

    def _marks_now(self) -> list[tuple[int, int]]:
        if self._is_plain:
            return [(p._version, p.data_ptr()) for p in self.trained.values()]
        whole = (local(p) if is_sharded(p) else p for p in self.trained.values())
        # A sparse tensor has no address, and flows do not support it.
        return [(p._version, p.data_ptr() if p.layout is torch.strided else 0) for p in whole]

    def _owned_now(self) -> list[tuple[int, bool]]:
        return [(id(p), p.requires_grad) for o in self.optimizers for p in parameters_of(o)]
