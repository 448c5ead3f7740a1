"""FSDP2 inside replicas and gossip between them, as torchtitan calls the door; four ranks."""

from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from support.frameworks import needs
from support.processes import run_processes

pytestmark = pytest.mark.process


@dataclass
class Spec:
    """The fields of torchtitan's `ModelSpec` that the door replaces."""

    parallelize_fn: object
    post_optimizer_build_fn: object = None


@dataclass
class Dims:
    """What the door and a `parallelize_fn` ask torchtitan's `ParallelDims`."""

    dp_replicate: int
    dp_shard: int
    spmd_backend: str = "partial_dtensor"

    @property
    def world_mesh(self):
        if "_mesh" not in self.__dict__:
            names = ("dp_replicate", "fsdp")
            shape = (self.dp_replicate, self.dp_shard)
            self._mesh = torch.distributed.init_device_mesh("cpu", shape, mesh_dim_names=names)
        return self._mesh

    @property
    def dp_replicate_enabled(self):
        return self.dp_replicate > 1

    def get_mesh(self, dims):
        return self.world_mesh[tuple(dims) if isinstance(dims, list) else dims]


class Container:
    """Optimizers as torchtitan's `OptimizersContainer` has them, with flat states."""

    def __init__(self, model):
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01)]

    def __iter__(self):
        return iter(self.optimizers)

    def step(self):
        self.optimizers[0].step()

    def zero_grad(self):
        self.optimizers[0].zero_grad()

    def state_dict(self):
        return {"lr": self.optimizers[0].param_groups[0]["lr"]}

    def load_state_dict(self, state):
        self.optimizers[0].param_groups[0]["lr"] = state["lr"]


def parallelize(model, *, parallel_dims):
    """As the models of torchtitan shard themselves."""
    from torch.distributed.fsdp import fully_shard

    axes = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    fully_shard(model, mesh=parallel_dims.get_mesh(axes))
    model.set_gradient_divide_factor(1.0)
    return model


def make_dims(real):
    if not real:
        return Dims(2, 2)
    from torchtitan.distributed import ParallelDims, parallel_dims

    parallel_dims.device_type = "cpu"  # without an accelerator it takes CUDA all the same
    ones = {"cp": 1, "tp": 1, "pp": 1, "ep": 1}
    return ParallelDims(
        dp_replicate=2, dp_shard=2, world_size=4, spmd_backend="partial_dtensor", **ones
    )


def build(real, **options):
    from gossipgrad.integrations.torchtitan import gossip_spec

    torch.manual_seed(0)
    dims = make_dims(real)
    spec = gossip_spec(Spec(parallelize), **options)
    model = spec.parallelize_fn(
        nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)), parallel_dims=dims
    )
    if real:
        from torchtitan.components.optimizer import default_adamw

        config = default_adamw(lr=0.01)
        config.implementation = "foreach"
        optimizers = config.build(model_parts=[model])
    else:
        optimizers = Container(model)
    spec.post_optimizer_build_fn(optimizers, [model], dims)
    return model, optimizers, spec.post_optimizer_build_fn.session


def step(rank, model, optimizers, number):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * number + rank))
    (model(x) ** 2).sum().div(32).backward()  # by the samples of all four ranks
    optimizers.step()
    optimizers.zero_grad()


def flat(model):
    return torch.cat([p.detach().to_local().flatten() for p in model.parameters()])


def save(real, folder, model, optimizers):
    from torch.distributed import checkpoint as dcp

    dcp.save({"optimizer": optimizers, **model.state_dict()}, checkpoint_id=folder)


def load(real, folder, model, optimizers):
    from torch.distributed import checkpoint as dcp

    state = model.state_dict()
    dcp.load({"optimizer": optimizers, **state}, checkpoint_id=folder)
    model.load_state_dict(state)


def managed(real, folder, model, optimizers):
    """torchtitan's own checkpointer, and how to save and load with it."""
    from torchtitan.components.checkpointer import CheckpointManager

    config = CheckpointManager.Config(enable=True, interval=1, folder=str(folder))
    return config.build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=None,
        states={},
        sd_adapter=None,
    )


def trained_saved_and_resumed(rank, store, real, folder):
    model, optimizers, session = build(real)
    manager = managed(real, folder, model, optimizers) if real else None
    for number in range(4):
        step(rank, model, optimizers, number)
    with session.consensus():
        mean = flat(model)
    own = flat(model)
    if manager is None:
        save(real, folder, model, optimizers)
    else:
        manager.save(4)
    for number in range(4, 7):
        step(rank, model, optimizers, number)
    session.average_()
    end = flat(model)
    session.close()
    again, optimizers, session = build(real)
    if manager is None:
        load(real, folder, again, optimizers)
    else:
        managed(real, folder, again, optimizers).load()
    is_mean = torch.equal(flat(again), mean)
    for number in range(4, 7):
        step(rank, again, optimizers, number)
    session.average_()
    resumed = torch.equal(flat(again), end)
    session.close()
    return session.world_size, not torch.equal(own, mean), is_mean, resumed


def gradients_are_those_of_all_samples(rank, store):
    """With equal data on both replicas one step is that of a single process."""
    from gossipgrad.integrations.torchtitan import gossip_spec

    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    x = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(1))
    (model(x) ** 2).sum().div(16).backward()
    expected = model.weight.grad
    spec = gossip_spec(Spec(parallelize))
    torch.manual_seed(0)
    sharded = spec.parallelize_fn(nn.Linear(3, 4), parallel_dims=Dims(2, 2))
    (sharded(x[rank % 2]) ** 2).sum().div(32).backward()
    return float((sharded.weight.grad.full_tensor() - expected).abs().max())


def refused(rank, store):
    from gossipgrad.integrations.torchtitan import PostOptimizerBuild, gossip_spec

    model = nn.Linear(3, 4)
    with pytest.raises(ValueError, match="partial_dtensor"):
        gossip_spec(Spec(parallelize)).parallelize_fn(model, parallel_dims=Dims(2, 2, "spmd_types"))
    with pytest.raises(ValueError, match="pipeline"):
        PostOptimizerBuild()(None, [model, model], None)
    dims = Dims(2, 2)
    hybrid = parallelize(model, parallel_dims=dims)
    with pytest.raises(ValueError, match="gossip_spec"):
        PostOptimizerBuild()(Container(hybrid), [hybrid], dims)


@pytest.mark.parametrize(
    "real", [False, pytest.param(True, marks=needs("torchtitan"))], ids=["documented", "installed"]
)
def test_replicas_of_two_shards_gossip_and_are_saved_and_resumed(real, tmp_path):
    assert not real or find_spec("torchtitan")
    for found in run_processes(4, trained_saved_and_resumed, real, tmp_path / "checkpoint"):
        assert found == (2, True, True, True)


def test_gradients_are_scaled_to_the_samples_of_all_replicas():
    assert max(run_processes(4, gradients_are_those_of_all_samples)) < 1e-6


def test_what_does_not_fit_is_refused():
    run_processes(4, refused)
