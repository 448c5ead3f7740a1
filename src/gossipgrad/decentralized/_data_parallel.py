"""A wrapper module with the interface of DistributedDataParallel."""

import inspect
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.optim import Optimizer

from gossipgrad.decentralized._gossip import check_settings, gossip
from gossipgrad.decentralized._session import GossipSession
from gossipgrad.errors import GossipError

__all__ = ["GossipDataParallel"]

_PREFIX = "module."
_BUCKETS = "give bucket_bytes, in bytes"
_BUFFERS = "buffers stay each rank's own until model.session.consensus(): leave it out"
_DEVICES = "the model trains on the device that it is on: leave it out"
_GRADIENTS = "gradients stay where they are: leave it out"
_UNUSED = "a parameter without a gradient blocks nothing: leave it out"
# Replacements of settings of DistributedDataParallel.
_INSTEAD = {
    "device_ids": _DEVICES,
    "output_device": _DEVICES,
    "dim": _DEVICES,
    "broadcast_buffers": _BUFFERS,
    "forward_sync_buffers": _BUFFERS,
    "init_sync": "model.attach(optimizer) makes all replicas that of rank 0: leave it out",
    "bucket_cap_mb": _BUCKETS,
    "bucket_cap_mb_list": _BUCKETS,
    "device_mesh": "give mesh, of one axis",
    "find_unused_parameters": _UNUSED,
    "skip_all_reduce_unused_params": _UNUSED,
    "check_reduction": _UNUSED,
    "static_graph": _UNUSED,
    "gradient_as_bucket_view": _GRADIENTS,
    "batched_grad_copy": _GRADIENTS,
    "delay_all_reduce_named_params": _GRADIENTS,
    "param_to_hook_all_reduce": _GRADIENTS,
    "mixed_precision": "use torch.autocast in the loop, and wire_dtype for what is sent",
}


class GossipDataParallel(nn.Module):
    """Wraps a module like `DistributedDataParallel`, and trains it by gossip.

    `DistributedDataParallel(module)` becomes `GossipDataParallel(module)`, and one line follows the
    creation of the optimizer: `model.attach(optimizer)`, which calls `gossip()`. Results are equal
    bit for bit, with the same guarantees when a partner is late or dead.

    Unlike with `DistributedDataParallel`, names of parameters and keys of `state_dict()` are those
    of the module itself, replicas differ until `model.session.consensus()` shows their average, and
    the wrapper cannot be pickled or copied: save `model.state_dict()`, copy `model.module`.
    Functions that traverse modules by these names need `model.module` too: `torch.func`'s
    `functional_call`, and `get_state_dict` and similar ones of `torch.distributed.checkpoint`.

    Args:
        module: The model.
        **settings: As for `gossip()`: `topology`, `mode`, `payload`, `process_group`, ... Leave
            out `device_ids` and `find_unused_parameters`: the model trains on its own device, and a
            parameter without a gradient blocks nothing.

    Attributes:
        module: The model.

    Raises:
        TypeError: If `gossip()` has no such setting.
        ValueError: If a setting is invalid for any group.

    Example:
        >>> import torch, gossipgrad as gg
        >>> model = gg.GossipDataParallel(torch.nn.Linear(2, 1), topology="matching")
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with model.attach(optimizer):
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        >>> list(model.state_dict())
        ['weight', 'bias']

    References:
        Li et al., PyTorch Distributed, VLDB 2020, for the shape of the interface.
    """

    def __init__(self, module: nn.Module, **settings: Any) -> None:
        super().__init__()
        if refused := [f"{name}: {way}" for name, way in _INSTEAD.items() if name in settings]:
            raise TypeError(f"not as in DistributedDataParallel. {'. '.join(refused)}.")
        inspect.signature(gossip).bind(module, [], **settings)
        check_settings(**settings)
        self.module = module
        self._settings = settings
        self._session: GossipSession | None = None
        self.register_load_state_dict_pre_hook(_add_prefix)

    @property
    def session(self) -> GossipSession:
        """The session of `attach`.

        Raises:
            GossipError: If no optimizer is attached.
        """
        if self._session is None:
            raise GossipError(
                "no optimizer is attached, so there is no session: call model.attach(optimizer) "
                "first, on every rank"
            )
        return self._session

    def attach(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        scaler: torch.amp.GradScaler | None = None,
    ) -> "GossipDataParallel":
        """Start gossip: from now on every step of the optimizer is a round.

        A collective. The replicas become that of rank 0, which `DistributedDataParallel` does in
        its constructor.

        Args:
            optimizer: The optimizer, or several: a round ends after the last of them has stepped.
            scaler: The `torch.amp.GradScaler` that steps it, if one does.

        Returns:
            The wrapper, for a `with` statement.

        Raises:
            GossipError: If an optimizer is attached already, or a rank dies.
            ValueError, AgreementError: As by `gossip()`.
        """
        if self._session is not None:
            raise GossipError(
                "an optimizer is attached already: attach several as one sequence, in the order in "
                "which they step; after close(), make a new wrapper around model.module"
            )
        settings = self._settings if scaler is None else {**self._settings, "scaler": scaler}
        self._session = gossip(self.module, optimizer, **settings)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass.

        Raises:
            GossipError: If it is a training pass and no optimizer is attached: the rank would train
                alone.
        """
        if self._session is None and self.training and torch.is_grad_enabled():
            raise GossipError(
                "a training pass before an optimizer is attached: this rank would train alone. "
                "Call model.attach(optimizer) on every rank first, or model.eval() or "
                "torch.no_grad() if this is no training"
            )
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Wrap all but the last backward pass of a step, for gradient accumulation.

        Only payloads with gradients need it; weights are sent at `optimizer.step()` in any case.
        """
        return nullcontext() if self._session is None else self._session.no_sync()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the module's own state, without a prefix."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load the module's own state; inside a session call `session.broadcast_()` afterwards.

        Also accepts keys that all begin with `module.`, as `DistributedDataParallel` saves them.
        """
        named = {name for name, _ in self.module.named_children()}
        if state_dict and "module" not in named and all(k.startswith(_PREFIX) for k in state_dict):
            state_dict = _without_prefix(state_dict)
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the module's own parameters, by their names in it."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the module's own buffers, by their names in it."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return the module's own parameter of that name."""
        return self.module.get_parameter(target)

    def get_buffer(self, target: str) -> Tensor:
        """Return the module's own buffer of that name."""
        return self.module.get_buffer(target)

    def close(self) -> None:
        """Close the session, if there is one; local. The wrapper is then the plain module."""
        if self._session is not None:
            self._session.close()

    def __enter__(self) -> "GossipDataParallel":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._session is not None:
            self._session.__exit__(kind, error, traceback)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a GossipDataParallel cannot be pickled or copied, it holds connections: save "
            "model.state_dict(), or pickle or copy model.module"
        )


def _without_prefix(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy without the prefix, with the module versions in its metadata."""
    stripped = OrderedDict(state_dict)
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        stripped._metadata = OrderedDict(metadata)  # pyrefly: ignore[missing-attribute]
    consume_prefix_in_state_dict_if_present(stripped, _PREFIX)
    return stripped


def _add_prefix(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: object) -> None:
    """Add the prefix for a wrapper inside another module, whose `load_state_dict` expects it."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[prefix + _PREFIX + key.removeprefix(prefix)] = state_dict.pop(key)
