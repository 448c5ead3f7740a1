"""Search for removable neurons: the groups of entries that go together, each of which is tested.

What they are says `_coupling`. Each result is tried: without a neuron whose outgoing weights are 0
the model must compute the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gossipgrad.apoptosis._coupling import Coupling
from gossipgrad.apoptosis._neurons import Entries, Neurons, weight_of
from gossipgrad.apoptosis._plan import Merging, surgery_of
from gossipgrad.apoptosis._surgery import operate
from gossipgrad.apoptosis._trial import narrow_norms
from gossipgrad.comm import is_sharded

__all__ = ["Found", "find"]


@dataclass(frozen=True)
class Found:
    """The neurons of a model that may be removed, and the layers that may not shrink.

    Attributes:
        neurons: The removable neurons.
        refused: By the name of a layer with weights, why none of its outputs is removed.
    """

    neurons: tuple[Neurons, ...]
    refused: Mapping[str, str]

    def without(self, reasons: Mapping[str, str]) -> "Found":
        """Return the same without the named neurons, which are refused for these reasons."""
        may = tuple(each for each in self.neurons if each.name not in reasons)
        stay = {path for each in may for path in each.producers}
        refused = {
            path: reasons[each.name]
            for each in self.neurons
            if each.name in reasons
            for path in each.producers
            if path not in stay
        }
        return Found(may, {**self.refused, **refused})


def find(model: nn.Module, example_input: Any) -> Found:
    """Find what can go alone: outputs of layers, channels of streams, heads, groups.

    The model is run with the example, in training mode and in evaluation mode; parameters, buffers
    and random numbers are restored.

    Args:
        model: Not wrapped by DistributedDataParallel or `torch.compile`.
        example_input: A tensor, a tuple of arguments, or a mapping of named ones.
    """
    layers = [name for name, module in model.named_modules() if _has_layer(module)]
    if any(is_sharded(parameter) for parameter in model.parameters()):
        return Found((), dict.fromkeys(layers, "its weights are sharded"))
    run = _runner(model, example_input)
    coupling = Coupling(model)
    with _as_it_was(model), torch.no_grad():
        for mode in (True, False):
            model.train(mode)
            with coupling.following():
                output = run()
            coupling.end(output)
            del output
    coupling.settle()
    neurons = _groups(model, coupling)
    found = Found(tuple(neurons), _refused(coupling, neurons, layers))
    with _as_it_was(model), torch.no_grad():
        model.eval()
        return found.without(_faults(model, run, neurons))


def _groups(model: nn.Module, coupling: Coupling) -> list[Neurons]:
    """Return the kinds of neurons: those with as many entries in the same dimensions."""
    runs: dict[int, dict[tuple[str, int], list[int]]] = {}
    for key, labels in coupling.axes.items():
        roots = coupling.roots(labels)
        order = np.argsort(roots, kind="stable")
        starts = np.flatnonzero(np.diff(roots[order], prepend=-1))
        for root, run in zip(roots[order][starts], np.split(order, starts[1:]), strict=True):
            runs.setdefault(int(root), {})[key] = run.tolist()
    kinds: dict[tuple[Any, ...], list[dict[tuple[str, int], list[int]]]] = {}
    for each in runs.values():
        kinds.setdefault(tuple((key, len(run)) for key, run in each.items()), []).append(each)
    produced, consumed = coupling.roles
    found: list[Neurons] = []
    for kind, members in kinds.items():
        keys = [key for key, _ in kind]
        makes = [key for key in keys if key in produced]
        reads = [key for key in keys if key in consumed]
        if len(members) < 2 or not makes or not reads or {*makes} & {*reads}:
            continue
        gains = [key for key in keys if key[0] in coupling.row_norms]
        if any(len(members) < len(coupling.axes[key]) for key in gains):
            coupling.refuse(coupling.axes[gains[0]], "a norm is over them and others")
            continue
        members.sort(key=lambda each: each[makes[0]])
        entries = {
            f"{name} {dim}": Entries(
                len(coupling.axes[name, dim]),
                torch.tensor([each[name, dim] for each in members]),
            )
            for name, dim in keys
        }
        modules = {name: name.rpartition(".")[0] for name, _ in keys}
        producers = list(dict.fromkeys(modules[name] for name, _ in makes))
        consumers = list(dict.fromkeys(modules[name] for name, _ in reads))
        beside = dict.fromkeys(path for name, path in modules.items())
        dropout = coupling.dropouts.get(consumers[0]) if len(consumers) == 1 else None
        found.append(
            Neurons(
                producers,
                consumers,
                [path for path in beside if path not in producers and path not in consumers],
                norms={c: coupling.norms[c] for c in consumers if c in coupling.norms},
                dropout=dropout,
                entries=entries,
                part=sum(each.producers[0] == producers[0] for each in found),
            )
        )
    return found


def _refused(
    coupling: Coupling, neurons: Sequence[Neurons], layers: Sequence[str]
) -> dict[str, str]:
    """Return by layer why none of its outputs is removed."""
    may = {path for each in neurons for path in (*each.producers, *each.companions)}
    refused, reasons = {}, coupling.reasons()
    outputs = {name.rpartition(".")[0]: (name, dim) for name, dim in coupling.roles.produced}
    for path in layers:
        if path in may:
            continue
        labels = coupling.axes.get(outputs.get(path, ("", 0)), np.zeros(0, dtype=np.int64))
        why = next((reasons[r] for r in coupling.roots(labels).tolist() if r in reasons), None)
        if path not in coupling.calls:
            why = "it is not called, or its weight is computed or used by another module"
        refused[path] = why or "no layer reads its outputs, or only some other layers do"
    return refused


def _has_layer(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    kinds = nn.Linear, nn.modules.conv._ConvNd, nn.Embedding
    return isinstance(module, kinds) or (isinstance(weight, nn.Parameter) and weight.ndim > 1)


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


def _faults(model: nn.Module, run: Callable[[], Any], neurons: Sequence[Neurons]) -> dict[str, str]:
    """Return by name why the model computes something else without one of these neurons."""
    if _fault(model, run, neurons) is None:
        return {}
    each_alone = {each.name: _fault(model, run, [each]) for each in neurons}
    return {name: why for name, why in each_alone.items() if why is not None}


def _fault(model: nn.Module, run: Callable[[], Any], neurons: Sequence[Neurons]) -> str | None:
    """Return what fails without the last neuron of each, when nothing reads it."""
    kept = [(p, p.detach(), p.grad) for p in model.parameters()]
    kept += [(b, b.detach(), None) for b in model.buffers()]
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    try:
        silent: dict[str, Tensor] = {}
        for each in neurons:
            for path in each.consumers:
                weight = weight_of(model.get_submodule(path))
                if path not in silent:
                    silent[path] = weight.detach().clone()
                    weight.grad = None
                    weight.set_(silent[path])  # pyrefly: ignore[bad-argument-type]
                dim, held = each.input_of(model, path)
                weight.movedim(dim, 0)[held.indices[-1]] = 0
        gone = [
            Merging(
                each,
                torch.arange(each.width - 1),
                scales=dict.fromkeys(each.row_norms(model), 2.0),  # are the weights gains?
            )
            for each in neurons
        ]
        with narrow_norms(model, gone):
            expected = _tensors(run())
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
            for name, value in values.items():
                if isinstance(value, int | tuple) and vars(module).get(name) != value:
                    setattr(module, name, value)
    if [t.shape for t in got] != [t.shape for t in expected] or not all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()) + 1e-6, equal_nan=True)
        for a, b in zip(got, expected, strict=True)
        if a.is_floating_point()
    ):
        return "the model computes something else without one that nothing seems to read"
    return None


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
