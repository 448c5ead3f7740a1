"""Backward passes: which gradients are there, in what order groups leave, and when it ends."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

from gossipgrad.errors import GossipError
from gossipgrad.sparsification._streams import make_clock

__all__ = ["Passes"]


class Passes:
    """Calls back as the gradients of groups become complete, group by group, in their order.

    A group is complete when each of its parameters has its gradient; one that is complete before
    its turn waits for those before it, so that all ranks send in the same order. What is left when
    backward ends is told by `end`.

    The end of a pass is an engine callback, as DistributedDataParallel's: it runs when the graph
    task is done, in the thread that called `backward`, so that gradients are final when `backward`
    returns and clipping sees them. torch has no public way to be told that. The engine lets go of
    the callback of a pass that raised; that is seen too, and told by `broken_off`.

    A backward pass that a `torch.autograd.Function` runs in its own backward, as checkpoints with
    `use_reentrant=True` do, is a graph task inside another, and part of that pass.

    Args:
        parameters: In the order in which backward is expected to finish their gradients.
        begin: Called as the first gradient of a pass arrives.
        launch: Called with the number of each group as its turn comes.
        end: Called once at the end of backward, after all or only some groups were launched.
        broken_off: Called when a pass that had begun has raised.

    Attributes:
        enabled: Whether gradients count; those of passes where they do not stay fresh.
        fresh: For each parameter whether it got a gradient since the last round.
        launched: How many groups of this pass have been launched.
        stamps: When each gradient of this pass was ready, by its clock; None before.
        handles: Of the hooks, which hold none of this.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        begin: Callable[[], None],
        launch: Callable[[int], None],
        end: Callable[[], None],
        broken_off: Callable[[], None],
    ) -> None:
        self._begin, self._launch, self._end, self._broken_off = begin, launch, end, broken_off
        self.enabled = True
        self.began = False
        self.launched = 0
        self.fresh = [False] * len(parameters)
        self.stamps: list[Any] = [None] * len(parameters)
        self._clock = make_clock(parameters[0].device)
        self._turns: dict[int, int] = {}  # by place, how many gradients came before it
        self._group_of: list[int] = []
        self._sizes: list[int] = []
        self._missing: list[int] = []
        self._callback: weakref.ref[_Callback] | None = None
        self._use(parameters)
        self.handles = [
            parameter.register_post_accumulate_grad_hook(_weakly(self._on_gradient))
            for parameter in parameters
        ]

    def regroup(self, sizes: Sequence[int]) -> None:
        """Groups of so many parameters each, from now on; between passes."""
        self._group_of = [group for group, size in enumerate(sizes) for _ in range(size)]
        self._sizes = list(sizes)
        assert len(self._group_of) == len(self._parameters)

    def reorder(self, parameters: Sequence[nn.Parameter]) -> None:
        """The same parameters in another order, from now on; `regroup` has to follow."""
        self.fresh = [self.fresh[self._places[id(parameter)]] for parameter in parameters]
        self._use(parameters)

    def open(self) -> None:
        """Begins a pass: that of the first gradient, or one without a backward."""
        self._begin()  # it may regroup
        self.began, self.launched = True, 0
        self._missing = list(self._sizes)
        self.stamps, self._turns = [None] * len(self._parameters), {}

    def ready_seconds(self) -> dict[int, float]:
        """From the first gradient of the last pass to each, by place."""
        there = [place for place, stamp in enumerate(self.stamps) if stamp is not None]
        there.sort(key=lambda place: self._turns[place])
        seconds = self._clock.seconds([self.stamps[place] for place in there]) if there else []
        return dict(zip(there, seconds, strict=True))

    def launch_rest(self) -> None:
        """Launches what has not been, complete or not."""
        while self.launched < len(self._missing):
            self._launch_next()

    def over(self) -> None:
        """The round of this pass is done: gradients to come belong to the next."""
        self.began, self._callback = False, None
        self.fresh = [False] * len(self._parameters)

    def remove(self) -> None:
        """Takes the hooks off."""
        self.enabled = False
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def _use(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._places = {id(parameter): place for place, parameter in enumerate(parameters)}

    def _launch_next(self) -> None:
        self.launched += 1
        self._launch(self.launched - 1)

    def _on_gradient(self, parameter: Tensor) -> None:
        place = self._places[id(parameter)]
        self.fresh[place] = True
        if not self.enabled:
            return
        if not self.began:
            self.open()
            self._await_end()
        group = self._group_of[place]
        if self.stamps[place] is None:
            self._missing[group] -= 1
            self._turns[place] = len(self._turns)
        elif self.launched > group:
            raise GossipError(
                "a parameter got a second gradient in one backward pass, after the first was "
                "sent: it is used by several parts of the model of which one is checkpointed "
                "with use_reentrant=True. Checkpoint with use_reentrant=False"
            )
        self.stamps[place] = self._clock.now()
        while self.launched < len(self._missing) and not self._missing[self.launched]:
            self._launch_next()

    def _await_end(self) -> None:
        callback = _Callback(self._end)
        self._callback = weakref.ref(callback, self._is_dropped)
        callback.queue()

    def _is_dropped(self, of: Any) -> None:
        # The engine drops callbacks it has run, too, but then the round is over.
        if self.began and of is self._callback:
            self._broken_off()


class _Callback:
    """The end of one pass, for the engine alone to hold, or the graph that it runs through."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def queue(self) -> None:
        """Has it called at the end of the graph task that runs now."""
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
        """Has it called at the end of the graph task in which `node` runs.

        That cannot be said from in here, where the inner one is still the current. But what `node`
        hands its gradients to runs after it, in the same task, unless only gradients of inputs
        beyond are asked for: `torch.autograd.grad` around an inner pass ends no round.
        """
        handles: list[RemovableHandle] = []

        def first(_: Any) -> None:
            taken = [handles.pop() for _ in range(len(handles))]
            for handle in taken:
                handle.remove()
            if taken:
                self.queue()

        following = (each for each, _ in node.next_functions if each is not None)
        handles += [each.register_prehook(first) for each in following]


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a bound method as long as its object lives; then it does nothing.

    For hooks on gradients: torch keeps them where the garbage collector does not look, so what
    such a hook holds, and the parameters that this holds in turn, would never be freed.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args)

    return call
