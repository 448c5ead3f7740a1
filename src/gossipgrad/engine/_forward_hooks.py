"""Hooks on the forward pass that report the buckets a module is about to read."""

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from gossipgrad.comm import is_sharded
from gossipgrad.engine._saving import NOTHING

__all__ = ["ForwardHooks"]

logger = logging.getLogger(__name__)


class ForwardHooks:
    """Calls back for each bucket before the first module that reads it in a forward pass.

    The first pass shows which module reads which parameter: its own if that was called, else
    the nearest enclosing one that was, else the one that is called first, as for sharded
    parameters, which FSDP2 gathers ahead. Where no module was seen (a model that is compiled
    whole), `is_ready` stays False. Passes without gradients, or inside backward
    (checkpointing), mix and teach nothing.

    Autograd may hold a parameter before its module is called: a penalty on weights, or a loss
    that is a method of the model. To mix it then would change what backward needs. Such a
    bucket waits for the end of the step, and `is_ready` is False from then on.
    """

    def __init__(
        self,
        model: nn.Module,
        buckets: Sequence[Sequence[nn.Parameter]],
        read: Callable[[int], None],
    ) -> None:
        self.awaited: set[int] = set()  # numbers of the buckets in flight
        self.are_read_by_hand = False  # autograd has held a parameter before its module was called
        self._uses: dict[nn.Parameter, int] = {}  # references to each parameter after the step
        self._buckets, self._read = buckets, read
        self._parents = {child: module for module in model.modules() for child in module.children()}
        self._owners: dict[nn.Parameter, list[nn.Module]] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                self._owners.setdefault(parameter, []).append(module)
        self._called: set[nn.Module] = set()
        self._of: dict[nn.Module, list[int]] | None = None
        self._first: list[int] = []  # read by the module that is called first
        self._is_first = True
        hook = _Hook(self._before_forward)
        self._handles = [
            module.register_forward_pre_hook(hook, prepend=True) for module in model.modules()
        ]

    @property
    def is_ready(self) -> bool:
        """Whether every bucket is known to have a module that reads it."""
        return self._of is not None and not self.are_read_by_hand

    def expect(self) -> None:
        """Await all buckets, as a step has ended."""
        self.awaited = set(range(len(self._buckets)))
        self._uses = {p: _uses(p) for group in self._buckets for p in group}

    def end_step(self, *, has_gradients: bool = True) -> None:
        """End a forward and backward pass, and learn from the first one.

        If a bucket has gradients, and no module has read it, the calls of modules have changed. In
        the middle of backward (`has_gradients=False`) that is assumed.
        """
        left, self.awaited = sorted(self.awaited), set()
        self._is_first = True
        if self._of is None:
            self._learn()
        elif any(not has_gradients or p.grad is not None for n in left for p in self._buckets[n]):
            self._of, self._called = None, set()

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _learn(self) -> None:
        if not self._called:
            return
        of: dict[nn.Module, list[int]] = {}
        first: list[int] = []
        for number, parameters in enumerate(self._buckets):
            readers = {reader for p in parameters for reader in self._readers(p)}
            for reader in readers:
                if reader is None:
                    first.append(number)
                else:
                    of.setdefault(reader, []).append(number)
        self._of, self._first, self._called = of, first, set()

    def _readers(self, parameter: nn.Parameter) -> list[nn.Module | None]:
        """Return the reading module for each owner of a parameter; None: the first one called."""
        if is_sharded(parameter):
            return [None]
        readers: list[nn.Module | None] = []
        for owner in self._owners.get(parameter, []):
            reader: nn.Module | None = owner
            while reader is not None and reader not in self._called:
                reader = self._parents.get(reader)
            readers.append(reader)
        return readers or [None]

    def _is_held(self, number: int) -> bool:
        """Whether autograd holds a parameter of a bucket since the step."""
        return any(_uses(p) > self._uses[p] for p in self._buckets[number] if not is_sharded(p))

    def _before_forward(self, module: nn.Module) -> None:
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        if self._of is None:
            self._called.add(module)
            return
        if not self.awaited:
            return
        numbers = self._of.get(module, [])
        if self._is_first:
            self._is_first, numbers = False, [*self._first, *numbers]
        for number in numbers:
            if number in self.awaited:
                self.awaited.discard(number)
                if self._is_held(number):
                    self._note_held()
                else:
                    self._read(number)

    def _note_held(self) -> None:
        if not self.are_read_by_hand:
            self.are_read_by_hand = True
            logger.warning(
                "parameters are read before their module is called (a penalty on weights, or a "
                "method of the model that reads them): mode sync mixes at the end of each step "
                "from now on, and the forward pass does not hide the exchange"
            )


def _uses(parameter: nn.Parameter) -> int:
    """Count the references to a parameter in C++: autograd holds what backward needs."""
    return parameter._use_count()  # pyrefly: ignore[missing-attribute]


class _Hook:
    """A module hook that does not keep the session alive; a copy of it does nothing."""

    def __init__(self, call: Callable[[nn.Module], None]) -> None:
        self._call = weakref.WeakMethod(call)

    def __call__(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        call = self._call()
        if call is not None:
            call(module)

    def __reduce__(self) -> Any:
        return NOTHING
