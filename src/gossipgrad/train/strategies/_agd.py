"""Layer-wise asynchronous all-reduce: the baseline that GossipGraD's authors call AGD."""

import threading
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossipgrad.train._spans import StepSpans

from ._all_reduce import ALL_REDUCED
from ._lockstep import Lockstep
from ._strategy import Replica, Setting, Strategy, Traffic, ring_bytes


class LayerwiseAllReduce(Lockstep):
    """Each layer's gradients are averaged over all ranks while backward goes on below it.

    Parameters and buffers are rank 0's at the start, which takes a broadcast of each.

    A layer is a module with parameters of its own. When its last gradient is there, an asynchronous
    all-reduce of the layer begins; just before the update, the step waits for those under way. A
    parameter without a gradient in a step counts as zeros, and gets the mean of the other ranks'.

    Exposed time is that of the waits, which begin when the backward pass has returned. Bytes are
    those of ring all-reduces, computed and not counted.

    Args:
        model: The replica.
        stop: Set when the run is to stop.
        spans: Gets a span "exchange" a layer and "wait".

    References:
        Daily et al., GossipGraD, arXiv:1803.05880, where AGD is the baseline with all-reduce. What
        it is in detail was read in the authors' code. Deviations: (1) a message a layer, weights
        and biases together; theirs is one a parameter; (2) Gloo's threads make the progress, theirs
        were threads with a communicator a parameter; (3) Gloo matches all-reduces by their order,
        so layers begin in the reverse of the order they are defined in, and one that is ready
        early waits for its turn; (4) all layers are awaited before the first is updated: an
        optimizer of torch updates all at once.
    """

    def __init__(self, model: nn.Module, stop: threading.Event, spans: StepSpans) -> None:
        super().__init__(model, stop)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor, src=0)
        self._spans = spans
        self._layers = [_Layer(parameters) for parameters in _layers(model)]
        self._next = 0  # the layer whose turn it is
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(layer))
            for layer in self._layers
            for parameter in layer.parameters
        ]

    def _wrap(self, model: nn.Module) -> nn.Module:
        for layer in self._layers:
            layer.fit()
        return model

    def traffic(self) -> Traffic:
        """Exposed time measured, bytes computed."""
        memory_bytes = sum(layer.flat.nbytes for layer in self._layers)
        return replace(super().traffic(), extra_memory_bytes=memory_bytes)

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, layer: "_Layer") -> Callable[[Tensor], None]:
        def on_gradient(parameter: Tensor) -> None:
            layer.missing.discard(id(parameter))
            while self._next < len(self._layers) and not self._layers[self._next].missing:
                self._begin_next()

        return on_gradient

    def _begin_next(self) -> None:
        layer = self._layers[self._next]
        self._next += 1
        layer.begin()
        self._bytes_sent += ring_bytes(layer.flat.nbytes, self._world_size)

    def _finish_backward(self) -> None:
        start = perf_counter()
        while self._next < len(self._layers):
            self._begin_next()
        for layer in self._layers:
            layer.wait(self._world_size)
        end = perf_counter()
        self._next = 0
        self._exposed_seconds += end - start
        self._spans.span("wait", start, end)
        for number, layer in enumerate(self._layers):
            times = layer.began_seconds, layer.ended_seconds or end
            self._spans.span("exchange", *times, bucket=number, bytes=layer.flat.nbytes)


class Agd(Strategy):
    """All-reduce by layers."""

    name = "agd"
    help = "all-reduce layer by layer, behind the backward pass"
    bytes_are = ALL_REDUCED

    def build(self, replica: Replica, setting: Setting, options: None) -> LayerwiseAllReduce:
        """Begin to average gradients, layer by layer."""
        return LayerwiseAllReduce(replica.model, replica.stop, replica.spans)


class _Layer:
    """Parameters whose gradients travel together, and the one message that they travel in."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self._work: dist.Work | None = None
        self.began_seconds = 0.0
        self.ended_seconds: float | None = None
        self.fit()
        self._expect()

    def fit(self) -> None:
        """Makes the message for the parameters' shapes."""
        parameters = self.parameters
        self.flat = torch.cat([torch.zeros_like(p).flatten() for p in parameters])
        sizes = [p.numel() for p in parameters]
        self._views = [
            piece.view_as(p) for piece, p in zip(self.flat.split(sizes), parameters, strict=True)
        ]

    def _expect(self) -> None:
        self.missing = {id(p) for p in self.parameters}

    @torch.no_grad()
    def begin(self) -> None:
        """Send what there is of the gradients."""
        for parameter, view in zip(self.parameters, self._views, strict=True):
            view.zero_() if parameter.grad is None else view.copy_(parameter.grad)
        self.began_seconds, self.ended_seconds = perf_counter(), None
        work = dist.all_reduce(self.flat, async_op=True)
        assert work is not None
        work.get_future().add_done_callback(self._done)
        self._work = work

    def _done(self, future: object) -> None:
        self.ended_seconds = perf_counter()

    @torch.no_grad()
    def wait(self, world_size: int) -> None:
        """Wait for the sum over all ranks and make the gradients its mean."""
        assert self._work is not None
        self._work.wait()
        self._work = None
        self.flat.div_(world_size)
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view
        self._expect()


def _layers(model: nn.Module) -> list[list[nn.Parameter]]:
    """Trained parameters by module and type, in reverse; a shared one belongs to its first."""
    seen: set[int] = set()
    layers: list[list[nn.Parameter]] = []
    for module in model.modules():
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                by_dtype.setdefault(parameter.dtype, []).append(parameter)
        layers.extend(by_dtype.values())
    return layers[::-1]
