"""Hooks on gradients that report complete groups and the end of backward."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

from gossipgrad.errors import GossipError

__all__ = ["GradientHooks"]


class GradientHooks:
    """Calls back as the gradients of each group become complete, in the order of groups.

    A group is complete when each of its parameters has its gradient, and waits for those before it.

    The end of a pass is an engine callback, as in DistributedDataParallel: it runs when the graph
    task is done, in the thread that called `backward`, so that gradients are final when `backward`
    returns and clipping sees them. torch has no public API for that. The engine drops the callback
    of a pass that raised; then `on_abort` is called.

    A backward pass that a `torch.autograd.Function` runs in its own backward, as checkpoints with
    `use_reentrant=True` do, is a graph task inside another, and part of that pass.

    It calls `begin` at the first gradient of a pass, `launch` with the number of each group that
    may be sent, and `end` at the end of backward, whether all groups were launched or not.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        begin: Callable[[], None],
        launch: Callable[[int], None],
        end: Callable[[], None],
        on_abort: Callable[[], None],
        stamp: Callable[[], Any],
    ) -> None:
        self._begin, self._launch, self._end, self._on_abort = begin, launch, end, on_abort
        self._stamp = stamp
        self.enabled = True  # else gradients do not count, and stay fresh
        self.waits = False  # whether no group is launched before the end of backward
        self.began = False
        self.fresh = [False] * len(parameters)  # whether it got a gradient since the last round
        self.stamps: dict[int, Any] = {}  # of this pass, in the order of arrival
        self._launched = 0
        self._sizes: list[int] = []
        self._group_of: list[int] = []
        self._missing: list[int] = []
        self._callback: weakref.ref[_Callback] | None = None
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        # The garbage collector does not see hooks that torch keeps in C++: a hook that referenced
        # this object and so the parameters would never be freed.
        on_gradient = weakref.WeakMethod(self._on_gradient)

        def hook(parameter: Tensor) -> None:
            if (method := on_gradient()) is not None:
                method(parameter)

        self._handles: list[RemovableHandle] = []  # they do not reference this object
        # A session that is dropped unclosed leaves no hooks on its model.
        weakref.finalize(self, _remove, self._handles)
        try:
            for parameter in parameters:
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        except BaseException:
            self.remove()
            raise

    def regroup(self, parameters: Sequence[nn.Parameter], sizes: Sequence[int]) -> None:
        """Replace the order of parameters, and the groups by their sizes; between passes."""
        self.fresh = [self.fresh[self._index_of[id(parameter)]] for parameter in parameters]
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._sizes = list(sizes)
        self._group_of = [group for group, size in enumerate(sizes) for _ in range(size)]

    def open(self) -> None:
        """Begin a pass, at the first gradient or without a backward."""
        self._begin()  # it may regroup
        self.began, self._launched = True, 0
        self._missing = list(self._sizes)
        self.stamps = {}

    def launch_rest(self) -> None:
        """Launch all remaining groups, complete or not."""
        while self._launched < len(self._missing):
            self._launch_next()

    def finish(self) -> None:
        """End the round of this pass: later gradients belong to the next."""
        self.began, self._callback = False, None
        self.fresh = [False] * len(self.fresh)

    def remove(self) -> None:
        """Removes the hooks."""
        self.enabled = False
        _remove(self._handles)

    def _launch_next(self) -> None:
        self._launched += 1
        self._launch(self._launched - 1)

    def _on_gradient(self, parameter: Tensor) -> None:
        index = self._index_of[id(parameter)]
        self.fresh[index] = True
        if not self.enabled:
            return
        if not self.began:
            self.open()
            callback = _Callback(self._end)
            self._callback = weakref.ref(callback, self._on_dropped)
            callback.queue()
        group = self._group_of[index]
        if index not in self.stamps:
            self._missing[group] -= 1
        elif group < self._launched:
            raise GossipError(
                "a parameter got a second gradient in one backward pass, after the first was sent: "
                "it is used by several parts of the model of which one is checkpointed with "
                "use_reentrant=True. Checkpoint with use_reentrant=False"
            )
        self.stamps[index] = self._stamp()
        while (
            not self.waits
            and self._launched < len(self._missing)
            and not self._missing[self._launched]
        ):
            self._launch_next()

    def _on_dropped(self, callback: Any) -> None:
        # The engine drops callbacks it has run, too, but then the round is over.
        if self.began and callback is self._callback:
            self._on_abort()


class _Callback:
    """The end of one pass; only the engine or the graph of the pass references it."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def queue(self) -> None:
        """Queue it for the end of the running graph task."""
        engine: Any = Variable._execution_engine
        engine.queue_callback(self)

    def __call__(self) -> None:
        around = torch._C._current_autograd_node()
        if isinstance(around, BackwardCFunction):
            self._queue_around(around)
            return
        with torch.no_grad():
            self._end()

    def _queue_around(self, node: Any) -> None:
        """Queue it for the end of the graph task in which `node` runs.

        It cannot be queued from here, where the inner task is still the current one. But the nodes
        that receive the gradients of `node` run after it, in the same task, unless only gradients
        of later inputs are requested: `torch.autograd.grad` around an inner pass ends no round.
        """
        handles: list[RemovableHandle] = []

        def first(_: Any) -> None:
            removed = [handles.pop() for _ in range(len(handles))]
            for handle in removed:
                handle.remove()
            if removed:
                self.queue()

        following = (each for each, _ in node.next_functions if each is not None)
        handles += [each.register_prehook(first) for each in following]


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()
