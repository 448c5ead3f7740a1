"""Which entries of which dimensions can only go together: one rule for all operations of torch.

Each entry of each dimension has a label. The model runs once, and each operation of torch that it
calls says which labels are the same thing from then on: an addition joins those of its operands
entry by entry, a convolution those of its input with those of its weight, a reshape or a
concatenation moves them. A union-find keeps them. In the end all entries of parameters that have
one label go together, whatever lies between: residual streams, gates, heads, groups.

The labels of a tensor lie along axes. An axis is usually one dimension; it is several where a
reshape has split one, such as that of fused queries into `(3, heads, width of a head)`. Dimensions
without an axis, such as batch and positions, have a fixed size. Where an operation needs a
dimension whole (a norm over it, the model's output, a constant of its size), its labels become one:
this is `whole`, with the reason.

A product of an input with a weight is where neurons may be merged: the labels along the sum end
there. They are the weight's inputs (`consumed`), its other dimension makes new ones (`produced`).
"""

import gc
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gossipgrad.apoptosis._neurons import input_dim, is_row_norm

__all__ = ["Axis", "Coupling", "Labels"]

Labels = np.ndarray
_POINTWISE = {
    *("relu", "relu6", "leaky_relu", "elu", "gelu", "silu", "hardtanh", "softplus", "_to_copy"),
    *("_prelu_kernel", "native_dropout", "clone", "copy", "empty_like", "zeros_like", "ones_like"),
    *("rand_like", "randn_like", "full_like", "bernoulli", "fill", "zero", "contiguous", "alias"),
    *("detach", "lift_fresh", "masked_fill", "where", "nan_to_num", "positive", "dropout"),
}
_SAME = {"detach", "alias", "clone", "_to_copy", "contiguous", "lift_fresh"}
_RESHAPES = {"view", "_unsafe_view", "reshape", "_reshape_alias", "squeeze", "unsqueeze"}
_REDUCTIONS = {"sum", "mean", "amax", "amin", "var", "std", "var_mean", "linalg_vector_norm"}
_REDUCTIONS |= {"prod", "logsumexp", "any", "all", "norm"}
_ALONG = {"_softmax", "_log_softmax", "softmax", "log_softmax", "cumsum", "cumprod"}
_BATCH_NORMS = re.compile(r".*batch_norm.*")
_SPATIAL = re.compile(r".*(pool|upsample|reflection_pad|replication_pad)\D*(\d)d.*")


class Axis(NamedTuple):
    """Labels along dimensions of a tensor: `labels` has their sizes."""

    dims: tuple[int, ...]
    labels: Labels


Axes = list[Axis]


class Role(NamedTuple):
    """What a dimension of a parameter is in products: by the name of the parameter, and the dim."""

    produced: set[tuple[str, int]]
    consumed: set[tuple[str, int]]


class Coupling(TorchDispatchMode):
    """Follows the labels of a model's parameters through its runs.

    Args:
        model: The model.

    Attributes:
        axes: By the name of a parameter or buffer and dimension, the labels of its entries.
        roles: Which dimensions make neurons, and which read them.
        norms: By consumer, the BatchNorm that alone reads its output.
        dropouts: By consumer, the dropout module whose output it reads.
        calls: The names of modules with weights that were called.
        row_norms: The names of gains of LayerNorm and RMSNorm over a residual stream.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._names: dict[int, str] = {id(module): name for name, module in model.named_modules()}
        self._owners: dict[str, nn.Module] = {}
        self._parameters: dict[int, tuple[str, tuple[int, ...]]] = {}
        self._sources: dict[int, tuple[str, tuple[int, ...]]] = {}  # they, and views of them
        self._parent = np.zeros(0, dtype=np.int64)
        self._reasons: list[tuple[Labels, str]] = []
        self._splits: list[tuple[Axis, str]] = []
        self._state: dict[int, Axes] = {}
        self._kept: dict[int, Axes] = {}
        self.axes: dict[tuple[str, int], Labels] = {}
        self.roles = Role(set(), set())
        self.norms: dict[str, str] = {}
        self.dropouts: dict[str, str] = {}
        self.calls: set[str] = set()
        self.row_norms: set[str] = set()
        for prefix, module in model.named_modules():
            for name, _ in module.named_parameters(prefix, recurse=False):
                self._owners.setdefault(name, module)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            made = [Axis((d,), self._fresh(n)) for d, n in enumerate(tensor.shape) if n > 1]
            self.axes |= {(name, axis.dims[0]): axis.labels for axis in made}
            self._kept[id(tensor)] = made
            if isinstance(tensor, nn.Parameter):
                self._parameters[id(tensor)] = name, tuple(range(tensor.ndim))
        self._views: set[int] = set()
        self._held: list[Any] = []
        self._entered: list[nn.Module] = []
        self._made: dict[int, str] = {}  # consumers by their output
        self._readers: dict[str, set[str]] = {}
        self._dropped: dict[int, str] = {}

    # -- labels -----------------------------------------------------------------------------

    def _fresh(self, count: int) -> Labels:
        start = len(self._parent)
        made = np.arange(start, start + count)
        self._parent = np.concatenate([self._parent, made])
        return made

    def roots(self, labels: Labels) -> Labels:
        """Return the representatives of labels: equal iff they go together."""
        found = self._parent[labels]
        while not np.array_equal(found, further := self._parent[found]):
            found = further
        self._parent[labels] = found
        return found

    def _union(self, one: Labels, other: Labels) -> None:
        one, other = np.broadcast_arrays(one, other)
        a, b = self.roots(one.ravel()), self.roots(other.ravel())
        for i, j in np.unique(np.stack([a, b], 1)[a != b], axis=0).tolist():
            while self._parent[i] != i:
                i = self._parent[i]
            while self._parent[j] != j:
                j = self._parent[j]
            self._parent[max(i, j)] = min(i, j)

    def whole(self, axis: Axis, dims: Sequence[int], reason: str) -> Axis:
        """Let entries along some dims go together; return the axis along the others."""
        labels, rest = axis.labels, list(axis.dims)
        for dim in dims:
            if dim in rest:
                at = rest.index(dim)
                first = labels.take([0], axis=at)
                if labels.shape[at] > 1:
                    self._union(first, labels)
                    self._reasons.append((first.ravel(), reason))
                labels = first.squeeze(at)
                del rest[at]
        return Axis(tuple(rest), labels)

    def refuse(self, labels: Labels, reason: str) -> None:
        """Note why entries stay that are not joined."""
        self._reasons.append((labels, reason))

    def reasons(self) -> dict[int, str]:
        """Return by representative the first reason why entries go together."""
        found: dict[int, str] = {}
        for labels, reason in self._reasons:
            for root in np.unique(self.roots(labels)).tolist():
                found.setdefault(root, reason)
        return found

    def settle(self) -> None:
        """Let entries go together that a rectangle needs: where one dimension was split in several.

        What goes must be whole slices along one of them, that in which most entries stay apart.
        """
        count = -1
        while count != (count := len(np.unique(self.roots(np.arange(len(self._parent)))))):
            for axis, reason in self._splits:
                if self._are_slices(axis):
                    continue
                best = max(axis.dims, key=lambda dim: self._slices(axis, dim))
                self.whole(axis, [dim for dim in axis.dims if dim != best], reason)
            for labels in (self.axes[gain, 0] for gain in self.row_norms):
                if len(np.unique(self.roots(labels))) < len(labels):
                    self.whole(Axis((0,), labels), [0], "a norm is over them")

    def _are_slices(self, axis: Axis) -> bool:
        """Whether entries differ along one dim alone."""
        roots = self.roots(axis.labels)
        rows = (np.moveaxis(roots, at, 0).reshape(size, -1) for at, size in enumerate(roots.shape))
        return any(bool((each == each[:, :1]).all()) for each in rows)

    def _slices(self, axis: Axis, dim: int) -> int:
        """Return how many entries would stay apart if only slices along a dim could go."""
        parent, reasons = self._parent.copy(), len(self._reasons)
        left = self.whole(axis, [each for each in axis.dims if each != dim], "")
        count = len(np.unique(self.roots(left.labels)))
        self._parent = parent
        del self._reasons[reasons:]
        return count

    # -- one run ----------------------------------------------------------------------------

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow one run inside; dropout lets all pass."""
        self._state, self._held, self._entered = dict(self._kept), [], []
        self._made, self._readers, self._dropped = {}, {}, {}
        self._sources, self._views = dict(self._parameters), set()
        handles, modes = [], []
        for module in self._model.modules():
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
            if isinstance(module, _DropoutNd):
                modes.append((module, module.training))
                module.training = False
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()
            for module, mode in modes:
                module.training = mode

    def end(self, output: Any) -> None:
        """End a run with its result, which keeps its size, as do tensors that something keeps."""
        for tensor in _tensors(output):
            self._all_whole(tensor, "its outputs are the model's")
        held = [(id(t), weakref.ref(t)) for t in _tensors(self._held) if id(t) not in self._kept]
        self._held = []
        gc.collect()
        for key, tensor in dict(held).items():
            if tensor() is not None:
                for axis in self._state.get(key, ()):
                    self.whole(axis, axis.dims, "its outputs are kept beyond the run")
        of = self._readers
        self.norms = {c: norm for c, norm in self.norms.items() if of.get(c) == {"batch_norm"}}

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._entered.append(module)
        given = _tensors((args, kwargs))
        if given and (dropout := self._dropped.get(id(given[0]))) is not None:
            self.dropouts[self._names[id(module)]] = dropout

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._entered.pop()
        if isinstance(module, _DropoutNd) and isinstance(output, Tensor):
            self._dropped[id(output)] = self._names[id(module)]
            self._held.append(output)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        name = name.rstrip("_") if not name.startswith("__") else name
        tensors = _tensors((args, kwargs))
        for tensor in tensors:
            if (made := self._made.get(id(tensor))) is not None:
                self._readers[made].add(name)
        is_dead = all(not self._state.get(id(tensor)) for tensor in tensors)
        self._held += [*tensors, output]
        if is_dead:
            for tensor in _tensors(output):
                self._state.pop(id(tensor), None)
            return output
        rule = getattr(self, f"_op_{name}", None)
        if rule is None:
            if _BATCH_NORMS.match(name):
                rule = self._batch_norm
            elif _is_pointwise(name):
                rule = self._pointwise
            elif name in _RESHAPES:
                rule = self._reshape
            elif name in _REDUCTIONS:
                rule = self._reduce
            elif name in _ALONG:
                rule = self._along
            elif match := _SPATIAL.match(name):
                rule = self._spatial(int(match[2]))
        first = next((t for t in _tensors(output)), None)
        if rule is None or first is None:
            for tensor in tensors:
                self._all_whole(tensor, f"they reach {name}(), which may mix them")
            for tensor in _tensors(output):
                self._state[id(tensor)] = []
            return output
        result = rule(name, args, kwargs, output)
        outputs = _tensors(output)
        if isinstance(result, dict):
            for tensor in outputs:
                self._state[id(tensor)] = result.get(id(tensor), [])
        else:
            for tensor in outputs:
                self._state[id(tensor)] = []
            self._state[id(first)] = result
        if func.is_view:
            self._views |= {id(tensor) for tensor in outputs}
        return output

    def _fixed(self, tensor: Tensor, dims: Iterable[int], reason: str) -> Axes:
        """Let a tensor's entries along dims go together; return its axes along the others."""
        dims = [*dims]
        made = [self.whole(axis, dims, reason) for axis in self._state.get(id(tensor), ())]
        return [axis for axis in made if axis.dims]

    def _all_whole(self, tensor: Tensor, reason: str) -> None:
        for axis in self._state.get(id(tensor), ()):
            self.whole(axis, axis.dims, reason)

    # -- joining ----------------------------------------------------------------------------

    def _join(
        self,
        operands: Sequence[tuple[Tensor, Sequence[int | None]]],
        sizes: Sequence[int],
        name: str,
    ) -> Axes:
        """Join tensors entry by entry in a space of `sizes`; each comes with its dims there."""
        axes: Axes = []
        covers: list[tuple[Sequence[int | None], Tensor, set[int]]] = []
        for tensor, dims in operands:
            own: set[int] = set()
            for axis in self._state.get(id(tensor), ()):
                moved = [dims[d] for d in axis.dims]
                axes.append(_sorted(Axis(tuple(d for d in moved if d is not None), axis.labels)))
                own |= {*axes[-1].dims}
            covers.append((dims, tensor, own))
        for number, axis in enumerate(axes):
            fixed = [
                d
                for d in axis.dims
                for dims, tensor, own in covers
                if d not in own and d in dims and tensor.shape[list(dims).index(d)] > 1
            ]
            if fixed:
                why = f"{name}() joins them with a tensor of fixed size"
                axes[number] = self.whole(axis, fixed, why)
        return self._merge([axis for axis in axes if axis.dims], sizes)

    def _merge(self, axes: Axes, sizes: Sequence[int]) -> Axes:
        """Make one axis of those that share a dimension."""
        done: Axes = []
        for axis in axes:
            near = [each for each in done if {*each.dims} & {*axis.dims}]
            done = [each for each in done if not {*each.dims} & {*axis.dims}]
            dims = tuple(sorted({*axis.dims, *(d for each in near for d in each.dims)}))
            spread = [_spread(each, dims, sizes) for each in (*near, axis)]
            for one, other in combinations(spread, 2):
                self._union(one, other)
            done.append(_trimmed(Axis(dims, spread[0])))
        return [axis for axis in done if axis.dims]

    def _aligned(self, tensor: Tensor, rank: int) -> tuple[Tensor, list[int | None]]:
        return tensor, [d + rank - tensor.ndim for d in range(tensor.ndim)]

    # -- rules ------------------------------------------------------------------------------

    def _pointwise(self, name: str, args: Any, kwargs: Any, output: Any) -> Axes:
        out = _tensors(output)[0]
        tensors = _tensors((args, kwargs))
        if name in _SAME and (source := self._sources.get(id(tensors[0]))) is not None:
            self._sources[id(out)] = source
        if name == "copy" and id(tensors[0]) not in self._views:
            tensors = tensors[1:2]  # all of it is overwritten
        return self._join([self._aligned(t, out.ndim) for t in tensors], out.shape, name)

    def _op_new_empty(self, name: str, args: Any, kwargs: Any, output: Tensor) -> Axes:
        """Take sizes that are those of the tensor for its own: trying finds out."""
        x = args[0]
        is_alike = x.ndim == output.ndim
        same = {d for d in range(x.ndim) if is_alike and x.shape[d] == output.shape[d]}
        return [axis for axis in self._state.get(id(x), ()) if {*axis.dims} <= same]

    _op_new_zeros = _op_new_ones = _op_new_full = _op_new_empty

    def _reshape(self, name: str, args: Any, kwargs: Any, output: Tensor) -> Axes:
        x = args[0]
        blocks = list(_blocks(x.shape, output.shape))
        axes = self._state.get(id(x), [])
        found: Axes = []
        for number, axis in enumerate(axes):
            touched = [(a, b) for a, b in blocks if {*a} & {*axis.dims}]
            source = [d for a, _ in touched for d in a]
            target = [d for _, b in touched for d in b]
            if any({*source} & {*other.dims} for other in (*axes[:number], *axes[number + 1 :])):
                self.whole(axis, axis.dims, f"{name}() makes one dimension of several")
                continue
            labels = _spread(axis, tuple(source), x.shape)
            made = _trimmed(Axis(tuple(target), labels.reshape([output.shape[d] for d in target])))
            if len(made.dims) > 1:
                self._splits.append((made, f"{name}() takes them apart"))
            if made.dims:
                found.append(made)
        return found

    def _op_expand(self, name: str, args: Any, kwargs: Any, output: Tensor) -> Axes:
        ahead = output.ndim - args[0].ndim
        return [Axis(tuple(d + ahead for d in a.dims), a.labels) for a in self._state[id(args[0])]]

    def _op_repeat(self, name: str, args: Any, kwargs: Any, output: Tensor) -> Axes:
        ahead, times = output.ndim - args[0].ndim, args[1]
        found = []
        for axis in self._state[id(args[0])]:
            dims = tuple(d + ahead for d in axis.dims)
            found.append(Axis(dims, np.tile(axis.labels, [times[d] for d in dims])))
        return found

    def _op_permute(self, name: str, args: Any, kwargs: Any, output: Tensor) -> Axes:
        x = args[0]
        if name == "t":
            order = list(range(x.ndim))[::-1]
        elif name == "transpose":
            order = list(range(x.ndim))
            one, two = args[1] % x.ndim, args[2] % x.ndim
            order[one], order[two] = two, one
        else:
            order = [d % x.ndim for d in args[1]]
        if (source := self._sources.get(id(x))) is not None:
            self._sources[id(output)] = source[0], tuple(source[1][d] for d in order)
        axes = self._state.get(id(x), ())
        return [_sorted(Axis(tuple(order.index(d) for d in a.dims), a.labels)) for a in axes]

    _op_t = _op_transpose = _op_permute

    def _op_select(self, name: str, args: Any, kwargs: Any, output: Tensor) -> Axes:
        x, dim, index = args[0], args[1] % args[0].ndim, args[2]
        return self._taken(x, dim, lambda labels, at: labels.take(index, axis=at), drops=True)

    def _op_slice(self, name: str, args: Any, kwargs: Any, output: Tensor) -> Axes:
        x, dim = args[0], (args[1] if len(args) > 1 else 0) % args[0].ndim
        start, stop, step = (*args[2:], *(None, None, None)[len(args[2:]) :])
        return self._taken(x, dim, lambda labels, at: _sliced(labels, at, slice(start, stop, step)))

    def _taken(
        self, x: Tensor, dim: int, take: Callable[[Labels, int], Labels], *, drops: bool = False
    ) -> Axes:
        found = []
        for axis in self._state.get(id(x), ()):
            labels, dims = axis.labels, axis.dims
            if dim in dims:
                labels = take(labels, dims.index(dim))
                dims = tuple(d for d in dims if d != dim) if drops else dims
            if drops:
                dims = tuple(d - (d > dim) for d in dims)
            made = _trimmed(Axis(dims, labels), is_size_one=True)
            if made.dims:
                found.append(made)
        return found

    def _op_split(self, name: str, args: Any, kwargs: Any, output: Any) -> dict[int, Axes]:
        x, dim = args[0], kwargs.get("dim", args[-1] if len(args) > 2 else 0) % args[0].ndim
        found, start = {}, 0
        for part in output:
            stop = start + part.shape[dim]
            found[id(part)] = self._taken(
                x, dim, lambda labels, at, s=slice(start, stop): _sliced(labels, at, s)
            )
            start = stop
        return found

    _op_split_with_sizes = _op_split

    def _op_unbind(self, name: str, args: Any, kwargs: Any, output: Any) -> dict[int, Axes]:
        x, dim = args[0], (args[1] if len(args) > 1 else 0) % args[0].ndim
        return {
            id(part): self._taken(x, dim, lambda labels, at, i=i: labels.take(i, at), drops=True)
            for i, part in enumerate(output)
        }

    def _op_cat(self, name: str, args: Any, kwargs: Any, output: Tensor) -> Axes:
        tensors = [t for t in args[0] if t.numel()]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % output.ndim
        own_dims = [None if d == dim else d for d in range(output.ndim)]
        along: dict[int, Axis] = {}  # a tensor may be there twice
        for key, size in {id(tensor): tensor.shape[dim] for tensor in tensors}.items():
            axes = self._state.get(key, [])
            own = [axis for axis in axes if dim in axis.dims]
            self._state[key] = [axis for axis in axes if dim not in axis.dims]
            along[key] = own[0] if own else Axis((dim,), self._fresh(size))
        beside = self._join([(tensor, own_dims) for tensor in tensors], output.shape, name)
        dims = tuple(sorted({d for axis in along.values() for d in axis.dims}))
        pieces = [_spread(along[id(tensor)], dims, tensor.shape) for tensor in tensors]
        for key, axis in along.items():  # it may be read again
            self._state[key].append(axis)
        joined = Axis(dims, np.concatenate(pieces, axis=dims.index(dim)))
        return self._merge([joined, *beside], output.shape)

    def _op_stack(self, name: str, args: Any, kwargs: Any, output: Tensor) -> Axes:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % output.ndim
        own_dims = [d + (d >= dim) for d in range(output.ndim - 1)]
        return self._join([(t, own_dims) for t in args[0]], output.shape, name)

    def _reduce(self, name: str, args: Any, kwargs: Any, output: Any) -> Axes:
        x = args[0]
        at = 2 if name in ("linalg_vector_norm", "norm") else 1
        dims = kwargs.get("dim", args[at] if len(args) > at else None)
        dims = [dims] if isinstance(dims, int) and not isinstance(dims, bool) else dims
        dims = [d % x.ndim for d in dims] if isinstance(dims, list | tuple) and dims else None
        dims = list(range(x.ndim)) if dims is None else dims
        keeps = _tensors(output)[0].ndim == x.ndim
        if dims == [x.ndim - 1] and self._is_over_stream(x):
            return [axis for axis in self._state[id(x)] if x.ndim - 1 not in axis.dims]
        found = []
        for axis in self._state.get(id(x), ()):
            axis = self.whole(axis, dims, f"{name}() reduces over them")
            moved = axis.dims if keeps else tuple(d - sum(e < d for e in dims) for d in axis.dims)
            if moved:
                found.append(Axis(moved, axis.labels))
        return found

    def _along(self, name: str, args: Any, kwargs: Any, output: Tensor) -> Axes:
        x = args[0]
        return self._fixed(x, [args[1] % x.ndim], f"{name.strip('_')}() is over them")

    def _spatial(self, count: int) -> Callable[..., Axes]:
        def rule(name: str, args: Any, kwargs: Any, output: Any) -> Axes:
            rank = args[0].ndim
            return self._fixed(args[0], range(rank - count, rank), f"{name}() pools over them")

        return rule

    def _op_constant_pad_nd(self, name: str, args: Any, kwargs: Any, output: Tensor) -> Axes:
        x, padding = args[0], args[1]
        dims = [x.ndim - 1 - i // 2 for i, size in enumerate(padding) if size]
        return self._fixed(x, dims, "pad() sets constants beside them")

    def _op_index(self, name: str, args: Any, kwargs: Any, output: Tensor) -> Axes:
        x, indices = args[0], args[1]
        has_gaps = any(index is None for index in indices)
        dims = range(x.ndim if has_gaps else len(indices))
        ahead = output.ndim - x.ndim
        made = self._fixed(x, dims, "they are indexed by a tensor")
        return [Axis(tuple(d + ahead for d in axis.dims), axis.labels) for axis in made]

    def _op_embedding(self, name: str, args: Any, kwargs: Any, output: Tensor) -> Axes:
        weight = args[0]
        rows, columns = (
            [axis for axis in self._state[id(weight)] if dim in axis.dims] for dim in (0, 1)
        )
        for axis in rows:
            self.whole(axis, axis.dims, "they are the entries of an embedding")
        if (source := self._sources.get(id(weight))) is not None:
            self.roles.produced.add((source[0], source[1][1]))
            self._call(source[0])
        return [Axis((output.ndim - 1,), axis.labels) for axis in columns]

    def _op_index_add(self, name: str, args: Any, kwargs: Any, output: Tensor) -> Axes:
        x, dim, _, source = args[:4]
        for tensor in (x, source):
            made = self._fixed(tensor, [dim % x.ndim], "index_add() is over them")
            self._state[id(tensor)] = made
        dims = [None if d == dim % x.ndim else d for d in range(x.ndim)]
        return self._join([(x, dims), (source, dims)], output.shape, name)

    # -- norms ------------------------------------------------------------------------------

    def _batch_norm(self, name: str, args: Any, kwargs: Any, output: Any) -> Axes:
        x, *beside = _tensors((args, kwargs))
        norm = self._entered[-1] if self._entered else None
        path = self._names.get(id(norm))
        if (made := self._made.get(id(x))) is not None and isinstance(path, str):
            self._readers[made].discard(name)
            if not self._readers[made]:
                self.norms[made] = path
            self._readers[made].add("batch_norm")
        if isinstance(path, str):
            self._call(f"{path}.weight")
        own = [(t, [1]) for t in beside if t.ndim == 1 and len(t) == x.shape[1]]
        return self._join([(x, range(x.ndim)), *own], x.shape, name)

    def _layer_norm(self, name: str, args: Any, kwargs: Any, output: Any) -> Axes:
        x, *beside = _tensors((args, kwargs))
        out = _tensors(output)[0]
        axes = self._pointwise(name, (x, *beside), {}, output)
        self._state[id(out)] = axes
        if len(args[1]) == 1 and self._is_over_stream(out):
            return axes
        return self._fixed(out, range(x.ndim - len(args[1]), x.ndim), "a norm is over them")

    def _is_over_stream(self, x: Tensor) -> bool:
        """Whether a module norms a tensor over one axis, whose entries may go: see `_judge`."""
        norm = self._entered[-1] if self._entered else None
        axes = [axis for axis in self._state.get(id(x), ()) if x.ndim - 1 in axis.dims]
        if norm is None or not is_row_norm(norm) or [a.dims for a in axes] != [(x.ndim - 1,)]:
            return False
        self.row_norms.add(f"{self._names[id(norm)]}.weight")
        return True

    _op_native_layer_norm = _op__fused_rms_norm = _layer_norm

    def _op_native_group_norm(self, name: str, args: Any, kwargs: Any, output: Any) -> Axes:
        x, *beside = _tensors(args)
        groups = args[6]
        joined = self._join([(x, range(x.ndim)), *((t, [1]) for t in beside)], x.shape, name)
        for axis in joined:
            if 1 in axis.dims:
                labels = np.moveaxis(axis.labels, axis.dims.index(1), 0)
                self._in_groups(labels, groups, f"a norm is over groups of {x.shape[1] // groups}")
        return joined

    def _in_groups(self, labels: Labels, groups: int, reason: str) -> Labels:
        """Let the entries of each group go together; return a label for each group."""
        parts = labels.reshape(groups, -1)
        return self.whole(Axis((0, 1), parts), [1], reason).labels

    # -- products ---------------------------------------------------------------------------

    def _call(self, parameter: str) -> str:
        self.calls.add(path := parameter.rpartition(".")[0])
        return path

    def _weight(
        self, operands: Sequence[tuple[Tensor, Sequence[int]]], along: int, output: Tensor
    ) -> bool:
        """Note the roles of a weight's dimensions; return whether neurons may be merged in it."""
        found = [(t, d) for t, d in operands if id(t) in self._sources]
        if len(found) != 1:
            return False
        weight, dims = found[0]
        name, source = self._sources[id(weight)]
        owner = self._owners[name]
        is_layer = isinstance(owner, nn.Linear | _ConvNd) or hasattr(owner, "nf")
        if not self._entered or owner is not self._entered[-1] or not is_layer:
            return False
        consumed, produced = (
            [d for d, at in zip(source, dims, strict=True) if at is not None and is_in(at)]
            for is_in in (lambda at: at == along, lambda at: at != along)
        )
        if consumed != [input_dim(owner)]:
            return False
        self.roles.consumed.add((name, consumed[0]))
        self.roles.produced.update((name, dim) for dim in produced)
        path = self._call(name)
        if path in self._readers:
            self._readers[path].add("called again")
        self._made[id(output)] = path
        self._readers.setdefault(path, set())
        return True

    def _product(
        self,
        name: str,
        operands: Sequence[tuple[Tensor, Sequence[int]]],
        sizes: Sequence[int],
        along: int,
        output: Tensor,
        bias: Tensor | None = None,
    ) -> Axes:
        """Join operands in a space whose last dim `along` is summed over."""
        joined = self._join(operands, sizes, name)
        merges = self._weight(operands, along, output)
        found: Axes = []
        for axis in joined:
            if along in axis.dims and not (merges and axis.dims == (along,)):
                why = "a product sums over them" if merges else f"{name}() sums over them"
                axis = self.whole(axis, [along], f"{why} without a layer's own weight"[:90])
            found += [axis] if axis.dims and axis.dims != (along,) else []
        if bias is not None:
            self._state[id(output)] = found
            rank = output.ndim
            found = self._join(
                [(output, range(rank)), self._aligned(bias, rank)], output.shape, name
            )
        return found

    def _op_mm(self, name: str, args: Any, kwargs: Any, output: Tensor) -> Axes:
        *first, a, b = args[:3] if name == "addmm" else args[:2]
        sizes = (a.shape[0], b.shape[1], a.shape[1])
        bias = first[0] if first else None
        return self._product(name, [(a, (0, 2)), (b, (2, 1))], sizes, 2, output, bias)

    _op_addmm = _op_mm

    def _op_bmm(self, name: str, args: Any, kwargs: Any, output: Tensor) -> Axes:
        a, b = args[-2:]
        sizes = (*a.shape[:2], b.shape[2], a.shape[2])
        bias = args[0] if name == "baddbmm" else None
        return self._product(name, [(a, (0, 1, 3)), (b, (0, 3, 2))], sizes, 3, output, bias)

    _op_baddbmm = _op_bmm

    def _op_linear(self, name: str, args: Any, kwargs: Any, output: Tensor) -> Axes:
        x, weight, *bias = _tensors((args, kwargs))
        rank = x.ndim
        sizes = (*x.shape[:-1], weight.shape[0], weight.shape[1])
        operands = [(x, (*range(rank - 1), rank)), (weight, (rank - 1, rank))]
        return self._product(name, operands, sizes, rank, output, bias[0] if bias else None)

    def _op_convolution(self, name: str, args: Any, kwargs: Any, output: Tensor) -> Axes:
        x, weight, bias = args[:3]
        is_transposed, groups = args[6], args[8]
        inputs, outputs = (0, 1) if is_transposed else (1, 0)
        kernel = [None] * (weight.ndim - 2)
        if groups == 1:
            own_dims = [0, 0, *kernel]
            own_dims[inputs], own_dims[outputs] = 2, 1
            own = [a for a in self._state.get(id(weight), ()) if max(a.dims) < 2]
            self._state[id(weight)] = own
            self._state[id(x)] = self._fixed(x, range(2, x.ndim), "convolution() is over them")
            sizes = (x.shape[0], output.shape[1], x.shape[1])
            operands = [(x, [0, 2, *kernel]), (weight, own_dims)]
            found = self._product(name, operands, sizes, 2, output)
        else:
            found = self._grouped(x, weight, output, groups, is_transposed)
        if bias is not None:
            self._state[id(output)] = found
            found = self._join([(output, range(output.ndim)), (bias, [1])], output.shape, name)
        return found

    def _grouped(
        self, x: Tensor, weight: Tensor, output: Tensor, groups: int, is_transposed: bool
    ) -> Axes:
        """Let each group go as a whole, its inputs and its outputs."""
        why = f"they are convolved in {groups} groups"
        own = [a for a in self._state.get(id(weight), ()) if 0 in a.dims]
        given = [a for a in self._state.get(id(x), ()) if a.dims == (1,)]
        for axis in self._state.get(id(x), ()):
            if axis.dims != (1,):
                self.whole(axis, axis.dims, why)
        if not own or not given:
            for axis in (*own, *given):
                self.whole(axis, axis.dims, why)
            return []
        mine = self._in_groups(own[0].labels, groups, why)
        self._union(mine, self._in_groups(given[0].labels, groups, why))
        if (source := self._sources.get(id(weight))) is not None:
            self._call(source[0])
        if is_transposed:
            return [Axis((1,), np.repeat(mine, output.shape[1] // groups))]
        return [Axis((1,), own[0].labels)]

    def _attention(self, name: str, args: Any, kwargs: Any, output: Any) -> Axes:
        q, k, v = args[:3]
        if q.shape[:-2] != k.shape[:-2]:
            for tensor in (q, k, v):
                self._all_whole(tensor, "queries share the heads of keys")
            return []
        last, out = q.ndim - 1, output[0]  # the space: batch and heads, queries, keys, width
        ahead = range(last - 1)
        operands = [(q, (*ahead, last - 1, last + 1)), (k, (*ahead, last, last + 1))]
        masks = [t for t in _tensors((args[3:], kwargs)) if t.ndim == q.ndim]
        operands += [(mask, (*ahead, last - 1, last)) for mask in masks]
        sizes = (*q.shape[:-1], k.shape[-2], q.shape[-1])
        scores = [
            self.whole(axis, (last - 1, last, last + 1), "attention sums over them")
            for axis in self._join(operands, sizes, "attention")
        ]
        self._state[id(v)] = self._fixed(v, [last - 1], "attention sums over them")
        self._state[id(out)] = [axis for axis in scores if axis.dims]
        operands = [(out, (*ahead, None, None)), (v, (*ahead, None, last))]
        return self._join(operands, out.shape, "attention")

    _op__scaled_dot_product_flash_attention_for_cpu = _attention
    _op__scaled_dot_product_flash_attention = _attention
    _op__scaled_dot_product_efficient_attention = _attention
    _op__scaled_dot_product_cudnn_attention = _attention


@cache
def _is_pointwise(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    of = [] if packet is None else [getattr(packet, each) for each in packet.overloads()]
    return name in _POINTWISE or any(torch.Tag.pointwise in each.tags for each in of)


def _blocks(a: Sequence[int], b: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the smallest runs of dims of two shapes that hold as many elements."""
    i = j = 0
    while i < len(a) or j < len(b):
        here, there = [i] if i < len(a) else [], [j] if j < len(b) else []
        left, right = a[i] if here else 1, b[j] if there else 1
        i, j = i + bool(here), j + bool(there)
        while left != right:
            if left < right and i < len(a):
                left, here, i = left * a[i], [*here, i], i + 1
            elif j < len(b):
                right, there, j = right * b[j], [*there, j], j + 1
            else:
                break
        yield here, there


def _spread(axis: Axis, dims: tuple[int, ...], sizes: Sequence[int]) -> Labels:
    """Return an axis' labels along more dims, which are rising."""
    shape = [sizes[d] if d in axis.dims else 1 for d in dims]
    return np.broadcast_to(axis.labels.reshape(shape), [sizes[d] for d in dims])


def _sorted(axis: Axis) -> Axis:
    order = sorted(range(len(axis.dims)), key=lambda at: axis.dims[at])
    return Axis(tuple(axis.dims[at] for at in order), axis.labels.transpose(order))


def _trimmed(axis: Axis, *, is_size_one: bool = False) -> Axis:
    """Drop dims along which all labels are equal."""
    labels, dims = axis.labels, list(axis.dims)
    for at in reversed(range(len(dims))):
        first = labels.take([0], axis=at)
        if (labels.shape[at] == 1) if is_size_one else (labels == first).all():
            labels = first.squeeze(at)
            del dims[at]
    return Axis(tuple(dims), labels)


def _sliced(labels: Labels, at: int, part: slice) -> Labels:
    return labels[(slice(None),) * at + (part,)]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
