"""Search for removable neurons: follow their channels through one run of the model.

It follows tensors through the calls of torch functions, as Python runs, so branches and loops do
not matter. Each result is tested: without a neuron whose outgoing weights are 0 the model must
compute the same.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from gossipgrad.apoptosis._activations import ACTIVATIONS
from gossipgrad.apoptosis._channels import (
    DROPOUTS,
    ELEMENTWISE,
    HARMLESS,
    NEUTRAL,
    RESHAPES,
    SUMS,
    Channels,
    behind,
)
from gossipgrad.apoptosis._neurons import Neurons, is_depthwise, is_layer, weight_of
from gossipgrad.apoptosis._plan import Merging, surgery_of
from gossipgrad.apoptosis._surgery import operate

__all__ = ["Found", "find"]

_SIZES = {"out_features", "in_features", "out_channels", "in_channels", "groups"}
_SIZES |= {"num_features", "num_parameters"}
_DEFAULTS = {"leaky_relu": 0.01, "elu": 1.0, "softplus": 1.0}


@dataclass
class _Trail:
    """The uses of one layer's outputs, in the order of the run."""

    consumers: list[str] = field(default_factory=list)
    companions: list[str] = field(default_factory=list)
    activations: list[str] = field(default_factory=list)
    joined: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    readers: list[str] = field(default_factory=list)  # layers that read the output itself
    norm: str | None = None
    dropout: str | None = None


@dataclass(frozen=True)
class Found:
    """The neurons of a model that may be removed, and the layers that may not shrink.

    Attributes:
        neurons: The removable neurons.
        refused: By the name of a linear or convolutional layer, why it does not shrink.
    """

    neurons: tuple[Neurons, ...]
    refused: Mapping[str, str]

    def without(self, reasons: Mapping[str, str]) -> "Found":
        """Return the same without the named neurons, which are refused for these reasons."""
        may = tuple(each for each in self.neurons if each.name not in reasons)
        return Found(may, {**self.refused, **reasons})


def find(model: nn.Module, example_input: Any, *, tries: bool = True) -> Found:
    """Follow the outputs of each linear and convolutional layer to the layers that read them.

    The model is run with the example, in training mode and in evaluation mode; parameters, buffers
    and random numbers are restored.

    Args:
        model: Not wrapped by DistributedDataParallel or `torch.compile`.
        example_input: A tensor, a tuple of arguments, or a mapping of named ones.
        tries: Whether to test each by a run without one of its neurons.
    """
    run = _runner(model, example_input)
    walk = _Walk(model)
    with _as_it_was(model):
        for mode in (True, False):
            model.train(mode)
            with walk.following(), torch.no_grad():
                walk.end(run())
    neurons, refused = walk.found()
    if tries:
        with _as_it_was(model), torch.no_grad():
            model.eval()
            neurons, refused = _try_all(model, run, neurons, refused)
    return Found(tuple(neurons), refused)


class _Walk(TorchFunctionMode):
    """Intercepts calls of torch, and tracks the positions of channels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.trails: dict[str, _Trail] = {}
        self.outside: dict[str, str] = {}
        self._names: dict[int, str] = {}
        self._owner: dict[int, nn.Module] = {}
        for name, module in model.named_modules():
            self._names[id(module)] = name
            for parameter in module.parameters(recurse=False):
                self._owner[id(parameter)] = module
        self._channels: dict[int, Channels] = {}
        self._direct: dict[int, str] = {}
        self._held: list[Tensor] = []  # keeps tensors alive, so that no id is reused
        self._entered: list[nn.Module] = []
        self._calls: Counter[str] = Counter()

    @contextmanager
    def following(self) -> Iterator[None]:
        """Track one run inside."""
        self._channels, self._direct, self._held = {}, {}, []
        self._entered, self._calls = [], Counter()
        for trail in self.trails.values():
            trail.activations, trail.dropout = [], None
        handles = []
        for module in self.model.modules():
            handles.append(module.register_forward_pre_hook(self._enter))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._entered.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._entered.pop()

    def end(self, output: Any) -> None:
        """End a run with its result."""
        for tensor in _tensors(output):
            if (channels := self._channels.get(id(tensor))) is not None:
                self._refuse(channels, "its outputs are the model's")

    def found(self) -> tuple[list[Neurons], dict[str, str]]:
        """Return neurons, and for layers without any the reason."""
        neurons: list[Neurons] = []
        refused = dict(self.outside)
        done: set[str] = set()
        for name in self.trails:
            if name in done:
                continue
            together = self._together(name)
            done |= {*together}
            trails = [self.trails[each] for each in together]
            reasons = [reason for trail in trails for reason in trail.reasons]
            consumers = _unique(c for trail in trails for c in trail.consumers)
            if not consumers:
                reasons.append("no linear or convolutional layer reads its outputs")
            if {*consumers} & {*together}:
                reasons.append("it reads its own outputs")
            activations = [a for trail in trails for a in trail.activations]
            shared = None
            if not reasons:
                made = Neurons(
                    together,
                    consumers,
                    _unique(c for trail in trails for c in trail.companions),
                    activation=_only(activations) if len(together) == 1 else None,
                    norms=self._norms(consumers),
                    dropout=trails[0].dropout if len(together) == len(consumers) == 1 else None,
                )
                shared = made.misfit(self.model)
                if shared is None:
                    neurons.append(made)
            for each in together if shared or reasons else ():
                refused[each] = shared or _unique(reasons)[0]
        for name, module in self.model.named_modules():
            if is_layer(module) and name not in self.trails and name not in refused:
                refused[name] = (
                    "its outputs were not seen: it is not called, or its weight is computed"
                )
        return neurons, refused

    def _together(self, name: str) -> list[str]:
        found, queue = [name], [name]
        while queue:
            for other in self.trails[queue.pop()].joined:
                if other not in found:
                    found.append(other)
                    queue.append(other)
        return found

    def _norms(self, consumers: Sequence[str]) -> dict[str, str]:
        norms = {}
        for name in consumers:
            trail = self.trails.get(name)
            if trail is not None and trail.norm is not None and {*trail.readers} == {"batch_norm"}:
                norms[name] = trail.norm
        return norms

    # -- calls ------------------------------------------------------------------------------

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        before = [(t, tuple(t.shape)) for t in _tensors((args, kwargs))]
        output = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func)).strip("_")
        if name in ("iadd", "imul", "isub", "itruediv", "radd", "rmul", "rtruediv"):
            name = name[1:]
        if name not in HARMLESS:
            for tensor, _ in before:
                if (layer := self._direct.get(id(tensor))) is not None:
                    self.trails[layer].readers.append(name)
        try:
            self._follow(name, before, args, kwargs, output)
        finally:
            self._held += [tensor for tensor, _ in before] + _tensors(output)
        return output

    def _follow(
        self,
        name: str,
        before: list[tuple[Tensor, tuple[int, ...]]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        tensors = [tensor for tensor, _ in before]
        carried = {
            id(t): (self._channels[id(t)], shape) for t, shape in before if id(t) in self._channels
        }
        if name == "linear" or (name.startswith("conv") and name[-1] == "d"):
            self._layer(tensors, output)
            return
        if not carried or name in HARMLESS:
            return
        results = _tensors(output)
        if len(results) != 1 or not isinstance(output, Tensor):
            if results or name in ("item", "tolist", "numpy", "bool", "float", "int"):
                for channels, _ in carried.values():
                    self._refuse(channels, f"they reach {name}()")
            return
        shapes = {id(t): shape for t, shape in before}
        label = self._through(name, tensors, shapes, carried, args, kwargs, output)
        if isinstance(label, Channels):
            self._channels[id(output)] = label
            return
        self._channels.pop(id(output), None)  # it may be written in place
        for channels, _ in carried.values():
            self._refuse(channels, label)

    def _layer(self, tensors: list[Tensor], output: Tensor) -> None:
        """Handle a linear or convolutional function: it reads channels and creates others."""
        x, weight = tensors[0], tensors[1]
        module = self._owner.get(id(weight))
        channels = self._channels.get(id(x))
        is_called = module is not None and any(module is each for each in self._entered)
        if module is None or not is_called:
            if channels is not None:
                self._refuse(channels, "a function reads them whose weight is no layer's own")
            return
        name = self._names[id(module)]
        channel_dim = x.ndim - 1 if isinstance(module, nn.Linear) else x.ndim + 1 - weight.ndim
        if channels is not None and is_depthwise(module) and channels.dim == channel_dim:
            self._trail(channels).companions.append(name)
            self._channels[id(output)] = channels
            return
        if not is_layer(module):
            self.outside[name] = "it is transposed, or in groups"
            if channels is not None:
                self._refuse(channels, f"{name} reads them, which is transposed or in groups")
            return
        self._calls[name] += 1
        trail = self.trails.setdefault(name, _Trail())
        if self._calls[name] > 1:
            trail.reasons.append("it is called more than once in a run")
        if channels is not None:
            if channels.dim != channel_dim:
                self._refuse(channels, f"{name} reads them along another dimension")
            elif self._calls[name] > 1:
                self._refuse(channels, f"{name}, which reads them, is called more than once")
            else:
                self._trail(channels).consumers.append(name)
        made_dim = output.ndim - 1 if isinstance(module, nn.Linear) else channel_dim
        self._channels[id(output)] = Channels(name, made_dim)
        self._direct[id(output)] = name

    def _through(
        self,
        name: str,
        tensors: list[Tensor],
        shapes: dict[int, tuple[int, ...]],
        carried: dict[int, tuple[Channels, tuple[int, ...]]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Tensor,
    ) -> Channels | str:
        """Return the channels after a function, or why they cannot be followed."""
        channels, shape = next(iter(carried.values()))
        trail = self._trail(channels)
        if name in SUMS or name == "pow":
            return self._elementwise(name, tensors, shapes, carried)
        if len(carried) > 1:
            return f"they are mixed in {name}()"
        if name == "prelu" and tensors[1].numel() > 1:
            owner = self._owner.get(id(tensors[1]))
            if owner is None or channels.dim != 1 or channels.block != 1:
                return "prelu() has a slope for each, which is no layer's own"
            trail.companions.append(self._names[id(owner)])
            trail.activations.append("prelu of channels")
            return channels
        if name not in NEUTRAL and name not in RESHAPES and name not in DROPOUTS:
            trail.dropout = None  # its output passes more than a change of shape
        if name in ELEMENTWISE:
            extra = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, float | int)]
            is_default = not extra or extra[0] in (_DEFAULTS.get(name, extra[0]), True, False)
            trail.activations.append(name if is_default else f"{name} of another slope")
        if name == "sum" or name.startswith("lp_"):
            trail.activations.append(name)  # bounds of one neuron are invalid for sums of many
        if name in DROPOUTS and isinstance(self._entered[-1], _DropoutNd):
            trail.dropout = trail.dropout or self._names[id(self._entered[-1])]
        if name == "batch_norm":
            return self._batch_norm(channels, shape, tensors)
        return behind(name, channels, args, kwargs, shape=shape, after=tuple(output.shape))

    def _elementwise(
        self,
        name: str,
        tensors: list[Tensor],
        shapes: dict[int, tuple[int, ...]],
        carried: dict[int, tuple[Channels, tuple[int, ...]]],
    ) -> Channels | str:
        """Handle sums and products with numbers, with themselves, or gated by others."""
        rank = max(len(shapes[id(t)]) for t in tensors)
        places = {c.dim - len(shape) for c, shape in carried.values()}
        if len(places) > 1 or (any(c.block != 1 for c, _ in carried.values()) and len(carried) > 1):
            return f"they meet other channels in {name}() along another dimension"
        place = places.pop()
        for tensor in tensors:
            shape = shapes[id(tensor)]
            if id(tensor) in carried or len(shape) < -place or shape[place] == 1:
                continue
            return f"{name}() joins them with a stream of others, such as a residual one"
        layers = _unique(c.layer for c, _ in carried.values())
        first = next(iter(carried.values()))[0]
        if len(layers) > 1:
            if name not in ("mul", "multiply"):
                return f"{name}() adds up the outputs of {' and '.join(layers)}"
            for layer in layers[1:]:
                self.trails[layers[0]].joined.append(layer)
                self.trails[layer].joined.append(layers[0])
        self._trail(first).activations.append(name)
        return Channels(first.layer, rank + place, first.block)

    def _batch_norm(
        self, channels: Channels, shape: tuple[int, ...], tensors: list[Tensor]
    ) -> Channels | str:
        norm = next((self._owner[id(t)] for t in tensors if id(t) in self._owner), None)
        if norm is None or not any(norm is each for each in self._entered):
            norm = self._entered[-1] if self._entered else None
        name = None if norm is None else self._names.get(id(norm))
        if name is None or channels.dim != 1 or channels.block != 1:
            return "batch_norm() is no layer's own, or works along another dimension"
        trail = self._trail(channels)
        layer = self._direct.get(id(tensors[0]))
        if layer is not None:
            self.trails[layer].norm = name
        if not any(name in each.companions for each in self.trails.values()):
            trail.companions.append(name)
        elif name not in trail.companions:
            return f"{name} is called for several layers"
        if trail.activations:
            trail.activations.append("batch_norm")  # behind the activation
        return channels

    def _trail(self, channels: Channels) -> _Trail:
        return self.trails[channels.layer]

    def _refuse(self, channels: Channels, reason: str) -> None:
        self._trail(channels).reasons.append(reason)


def _only(activations: Sequence[str]) -> str | None:
    if not activations:
        return "identity"
    only = activations[0] if len(activations) == 1 else ""
    return only if only in ACTIVATIONS else None


def _unique(names: Any) -> list[str]:
    return list(dict.fromkeys(names))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _runner(model: nn.Module, example_input: Any) -> Callable[[], Any]:
    if isinstance(example_input, Mapping):
        return lambda: model(**example_input)
    if isinstance(example_input, tuple | list):
        return lambda: model(*example_input)
    return lambda: model(example_input)


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Restore modes, buffers and random numbers of the model after runs inside."""
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


# -- trying -------------------------------------------------------------------------------------


def _try_all(
    model: nn.Module, run: Callable[[], Any], neurons: list[Neurons], refused: dict[str, str]
) -> tuple[list[Neurons], dict[str, str]]:
    """Refuse neurons without which the model computes something else."""
    if _fault(model, run, neurons) is None:
        return neurons, refused
    good = []
    for each in neurons:
        why = _fault(model, run, [each])
        if why is None:
            good.append(each)
        else:
            refused = {**refused, **dict.fromkeys(each.producers, why)}
    return good, refused


def _fault(model: nn.Module, run: Callable[[], Any], neurons: Sequence[Neurons]) -> str | None:
    """Return what fails without the last neuron of each, when nothing reads it."""
    neurons = [each for each in neurons if each.width(model) > 1]
    kept = [(p, p.detach(), p.grad) for p in model.parameters()]
    kept += [(b, b.detach(), None) for b in model.buffers()]
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    try:
        for each in neurons:
            width = each.width(model)
            for path in each.consumers:
                weight = weight_of(model.get_submodule(path))
                silent = weight.detach().clone()
                silent.unflatten(1, (width, -1))[:, -1] = 0
                weight.grad = None
                weight.set_(silent)  # pyrefly: ignore[bad-argument-type]
        expected = _tensors(run())
        gone = [Merging(each, w := each.width(model), torch.arange(w - 1)) for each in neurons]
        operate(model, [], surgery_of(model, gone))
        got = _tensors(run())
    except Exception as error:
        return f"the model cannot run without one of them: {str(error).splitlines()[0][:100]}"
    finally:
        for tensor, value, grad in kept:
            tensor.grad = None
            tensor.set_(value)  # pyrefly: ignore[bad-argument-type]
            tensor.grad = grad
        for module, values in attributes:
            for name in values.keys() & _SIZES:
                setattr(module, name, values[name])
    if [t.shape for t in got] != [t.shape for t in expected] or not all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()) + 1e-6, equal_nan=True)
        for a, b in zip(got, expected, strict=True)
        if a.is_floating_point()
    ):
        return "the model computes something else without one that nothing seems to read"
    return None
