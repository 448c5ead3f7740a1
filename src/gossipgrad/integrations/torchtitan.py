"""Integration with torchtitan: FSDP2 inside each replica, gossip between replicas."""

import io
from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from gossipgrad.engine import Session
from gossipgrad.integrations._sessions import Open, open_session

__all__ = ["PostOptimizerBuild", "gossip_spec"]

_REPLICAS = "dp_replicate"


def gossip_spec(spec: Any, *, open: Open | None = None, **options: Any) -> Any:
    """Return a model specification that trains by gossip along the `dp_replicate` axis.

    For example::

        config.model_spec = gossip_spec(model_registry("8B"), mode="overlap")
        config.parallelism.data_parallel_replicate_degree = 4
        config.parallelism.spmd_backend = "partial_dtensor"

    `parallelize_fn` gets the mesh of one replica, so FSDP2 shards only over `dp_shard`;
    `post_optimizer_build_fn` becomes `PostOptimizerBuild`, which first calls that of the
    specification.

    Args:
        spec: A `ModelSpec` of torchtitan.
        open: The function that opens the session: `gg.gossip` by default, or a function of model,
            optimizers and `mesh=` that calls one.
        options: Arguments of `open`, for example `mode="stale"`.

    Returns:
        Another specification of the same model.
    """
    return replace(
        spec,
        parallelize_fn=_of_one_replica(spec.parallelize_fn),
        post_optimizer_build_fn=PostOptimizerBuild(
            spec.post_optimizer_build_fn, open=open, **options
        ),
    )


def _of_one_replica(parallelize: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Return a `parallelize_fn` for one replica that scales gradients for all replicas."""

    def call(model: nn.Module, *, parallel_dims: Any, **kwargs: Any) -> nn.Module:
        if parallel_dims.spmd_backend != "partial_dtensor":
            raise ValueError(
                f"spmd_backend={parallel_dims.spmd_backend!r} ties replicas together in one mesh: "
                'set config.parallelism.spmd_backend = "partial_dtensor"'
            )
        replicas = parallel_dims.dp_replicate
        parallel_dims.world_mesh  # noqa: B018 (is built of all replicas, and then shared)
        one = copy(parallel_dims)
        one.dp_replicate = 1
        model = parallelize(model, parallel_dims=one, **kwargs)
        for module in model.modules():
            # Losses are divided by the tokens of all replicas, and gradients summed over one.
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1 / replicas)
                module.set_force_sum_reduction_for_comms(True)  # Gloo cannot scale in the sum
        return model

    return call


class PostOptimizerBuild:
    """A `post_optimizer_build_fn` that opens the session, and adds it to torchtitan's checkpoints.

    The model in a checkpoint is the consensus. The state of the optimizers in it also contains each
    rank's session state under its own name, to continue exactly; it is loaded when the next forward
    pass begins. A checkpoint of a run without gossip, or of other ranks, is loaded with
    `checkpoint.exclude_from_loading=["optimizer"]`. The session ends with the process.

    Args:
        before: Another such function, called first.
        open, options: As of `gossip_spec`.

    Attributes:
        session: The session, after the optimizers are built.
    """

    session: Session

    def __init__(
        self, before: Callable[..., None] | None = None, *, open: Open | None = None, **options: Any
    ) -> None:
        self._before, self._open, self._options = before, open, options
        self._loaded: bytes | None = None
        self._is_due = False

    def __call__(self, optimizers: Any, model_parts: list[nn.Module], parallel_dims: Any) -> None:
        """Open the session; called by torchtitan after it has built optimizers; a collective.

        Raises:
            ValueError: For pipeline parallelism, or a model that is also sharded over replicas.
        """
        if self._before is not None:
            self._before(optimizers, model_parts, parallel_dims)
        if len(model_parts) != 1:
            raise ValueError(
                f"pipeline parallelism has made {len(model_parts)} parts of the model: gossip "
                "takes one, so set config.parallelism.pipeline_parallel_degree = 1"
            )
        (model,) = model_parts
        for name, parameter in model.named_parameters():
            mesh: Any = getattr(parameter, "device_mesh", None)
            if mesh is not None and _REPLICAS in (mesh.mesh_dim_names or ()):
                raise ValueError(
                    f"{name!r} is on a mesh with the axis {_REPLICAS!r}, over which FSDP2 averages "
                    "gradients in every step already: take gossip_spec(spec), which keeps it off"
                )
        options = {"mesh": parallel_dims.get_mesh(_REPLICAS), **self._options}
        self.session = open_session(
            self._open,
            model,
            list(optimizers),
            scaler=None,
            options=options,
            plain="leave replicas to gossip_spec",
        )
        self._wrap(optimizers)
        whole: Any = model
        whole.state_dict = self._in_consensus(model.state_dict)
        model.register_load_state_dict_post_hook(self._after_load)
        model.register_forward_pre_hook(self._before_forward, prepend=True)

    def _wrap(self, optimizers: Any) -> None:
        """Add this rank's state to the optimizers' state in checkpoints."""
        take, load = optimizers.state_dict, optimizers.load_state_dict
        name = f"gossip.rank{torch.distributed.get_rank()}"

        def state_dict() -> dict[str, Any]:
            rest, packed = take(), io.BytesIO()
            torch.save(self.session.state_dict(copy=False), packed)
            return {**rest, name: packed.getvalue()}

        def load_state_dict(state: dict[str, Any]) -> None:
            rest = {key: value for key, value in state.items() if not key.startswith("gossip.")}
            load(rest)
            self._loaded, self._is_due = state.get(name), True

        optimizers.state_dict, optimizers.load_state_dict = state_dict, load_state_dict

    def _in_consensus(self, state_dict: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
        """Return `model.state_dict` for the average of all replicas; a collective."""

        def call(*args: Any, **kwargs: Any) -> dict[str, Any]:
            # The loaded state is equal on all ranks. Copies, since torchtitan writes into the
            # result.
            with nullcontext() if self._is_due else self.session.consensus():
                state = state_dict(*args, **kwargs)
                values = {
                    name: value.detach().clone() if isinstance(value, Tensor) else value
                    for name, value in state.items()
                }
            state.update(values)  # and keeps its metadata
            return state

        return call

    def _after_load(self, *_: Any) -> None:
        self._is_due = True

    def _before_forward(self, *_: Any) -> None:
        """Continue from the loaded state, when it is complete; a collective."""
        if not self._is_due:
            return
        loaded, self._loaded, self._is_due = self._loaded, None, False
        if all(self.session.agree(int(loaded is not None))):
            state = torch.load(io.BytesIO(loaded or b""), map_location="cpu", weights_only=True)
            self.session.load_state_dict(state)
        else:
            self.session.broadcast_()
