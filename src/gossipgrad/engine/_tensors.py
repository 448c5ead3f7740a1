"""The tensors of the user's model and optimizers to exchange."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossipgrad.comm import TensorSpec, local, parameters_of
from gossipgrad.engine._step_hooks import held_by
from gossipgrad.errors import GossipError

__all__ = [
    "NON_NEGATIVE",
    "Entry",
    "gradient_entries",
    "state_entries",
    "weight_entries",
]

# Adam and its variants; Adamax; Adagrad; RMSprop and Adadelta; Rprop; Adafactor, whose factors have
# the shape of a parameter with one row or one column; Shampoo's graft; GossipAdamW.
NON_NEGATIVE = frozenset(
    {
        *("exp_avg_sq", "max_exp_avg_sq", "exp_inf", "sum", "square_avg", "acc_delta"),
        *("step_size", "variance", "row_var", "col_var", "square", "momentum_sq"),
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One tensor to exchange.

    Attributes:
        spec: Name, local shape and type.
        parameter: The parameter itself, or the one that the state or gradient belongs to.
        read: Returns the tensor, or None if it does not exist yet. None: the parameter itself.
        non_negative: Whether mixing must not result in negative values.
        rows: First row and number of rows, for a tensor that is sent in pieces.
        span: First element and number of elements of these, for a slice of a bucket.
    """

    spec: TensorSpec
    parameter: nn.Parameter
    read: Callable[[], Tensor | None] | None = None
    non_negative: bool = False
    rows: tuple[int, int] | None = None
    span: tuple[int, int] | None = None

    def tensor(self) -> Tensor | None:
        """The live tensor (a DTensor's local shard, or rows), or None if it does not exist yet."""
        whole = self.parameter if self.read is None else self.read()
        if whole is None:
            return None
        if whole.layout is not torch.strided:
            TensorSpec.of(self.spec.name, whole)  # raises: a gradient may become sparse
        held = local(whole)
        held = held if self.rows is None else held.narrow(0, *self.rows)
        return held if self.span is None else held.reshape(-1).narrow(0, *self.span)

    def between(self, first: int, count: int) -> "Entry":
        """Return some of its elements as an entry of one dim, to read."""
        return replace(self, spec=replace(self.spec, shape=(count,)), span=(first, count))

    def pieces(self, limit_bytes: int) -> list["Entry"]:
        """Return itself, or pieces of as many whole rows as fit into `limit_bytes`."""
        shape, width = self.spec.shape, self.spec.dtype.itemsize
        if self.spec.numel * width <= limit_bytes or not shape:
            return [self]
        height = max(1, limit_bytes * shape[0] // (self.spec.numel * width))
        pieces: list[Entry] = []
        for start in range(0, shape[0], height):
            count = min(height, shape[0] - start)
            spec = replace(self.spec, shape=(count, *shape[1:]))
            pieces.append(replace(self, spec=spec, rows=(start, count)))
        return pieces


def weight_entries(parameters: dict[str, nn.Parameter]) -> list[Entry]:
    """Return one entry per parameter.

    Raises:
        ValueError: If a parameter is complex, sparse or of a type that has no average.
    """
    return [Entry(TensorSpec.of(name, p), p) for name, p in parameters.items()]


def gradient_entries(parameters: dict[str, nn.Parameter]) -> list[Entry]:
    """Return one entry per parameter, for its `.grad`."""
    return [Entry(TensorSpec.of(name, p), p, _gradient_of(p)) for name, p in parameters.items()]


def state_entries(
    parameters: dict[str, nn.Parameter],
    optimizers: Sequence[Optimizer],
    *,
    travels: Callable[[str], bool] = lambda key: key != "step",
) -> list[Entry]:
    """Return an entry for each floating state tensor of a parameter's shape.

    Only for keys for which `travels` returns True.

    The state before the first step is found by stepping a copy of the optimizer on small stand-ins.
    An optimizer with a method `state_to_average()` defines its state to average itself: parameters
    with the name, shape, type and reader of each tensor.

    Raises:
        GossipError: If the copy cannot step.
    """
    names = {id(p): name for name, p in parameters.items()}
    entries = []
    for optimizer in optimizers:
        if hasattr(optimizer, "state_to_average"):
            for parameter, key, shape, dtype, read in optimizer.state_to_average():
                if id(parameter) in names:
                    spec = TensorSpec(f"{names[id(parameter)]}: {key}", shape, dtype)
                    is_square = key.partition(".")[0] in NON_NEGATIVE
                    entries.append(Entry(spec, parameter, read, non_negative=is_square))
            continue
        if held := held_by(optimizer):
            raise GossipError(
                f"{type(optimizer).__name__} holds another optimizer ({type(held[0]).__name__}), "
                "and what state it keeps cannot be found without a step of that one: use "
                "payload='weights', which leaves state alone, or give the inner optimizer"
            )
        for parameter, key, dtype in _kept(optimizer):
            if id(parameter) in names and travels(key):
                name = f"{names[id(parameter)]}: {key}"
                spec = TensorSpec(name, tuple(local(parameter).shape), dtype)
                read = _state_of(optimizer, parameter, key)
                entries.append(Entry(spec, parameter, read, non_negative=key in NON_NEGATIVE))
    return entries


def _gradient_of(parameter: nn.Parameter) -> Callable[[], Tensor | None]:
    return lambda: parameter.grad


def _state_of(
    optimizer: Optimizer, parameter: nn.Parameter, key: str
) -> Callable[[], Tensor | None]:
    return lambda: optimizer.state.get(parameter, {}).get(key)


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """Return a small parameter of as many dims with distinct sizes, to recognise its state."""
    shape = [min(size, 2 + dim) for dim, size in enumerate(parameter.shape)]
    stand_in = nn.Parameter(torch.ones(shape, dtype=parameter.dtype, device=parameter.device))
    stand_in.grad = torch.ones_like(stand_in)
    return stand_in


def _kept(optimizer: Optimizer) -> list[tuple[nn.Parameter, str, torch.dtype]]:
    stand_ins = {id(p): _stand_in(p) for p in parameters_of(optimizer) if p.requires_grad}
    clone = object.__new__(type(optimizer))
    clone.__dict__.update(
        {name: value for name, value in vars(optimizer).items() if name != "step"}
    )
    for name, value in vars(optimizer).items():
        if name.startswith("_optimizer_") and isinstance(value, OrderedDict):
            clone.__dict__[name] = OrderedDict()
    clone.state = defaultdict(dict)
    clone.param_groups = [
        {**group, "params": [stand_ins[id(p)] for p in group["params"] if p.requires_grad]}
        for group in optimizer.param_groups
    ]
    try:
        clone.step()
    except Exception as error:
        raise GossipError(
            f"what state {type(optimizer).__name__} keeps could not be found by letting a copy of "
            f"it step ({error}): use payload='weights', which leaves state alone"
        ) from error
    return [
        (parameter, key, value.dtype)
        for parameter in parameters_of(optimizer)
        if parameter.requires_grad
        for key, value in clone.state.get(stand_ins[id(parameter)], {}).items()
        if key != "step"
        and isinstance(value, Tensor)
        and value.is_floating_point()
        and value.shape == stand_ins[id(parameter)].shape
    ]
