"""Islands: several ranks with one replica, against sessions whose ranks have the island's batch."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gossipgrad as gg
from gossipgrad.comm import Faults, FaultyTransport, TCPTransport
from support.processes import run_processes
from support.replicas import flat, network
from support.sessions import run_sessions

pytestmark = pytest.mark.process
STEPS = 7
ADAMW = partial(torch.optim.AdamW, lr=0.02)
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
EXACT = {  # what equals a session without islands, to the rounding of the gradients' mean
    "overlap": (MOMENTUM, {}),
    "sync": (MOMENTUM, {"mode": "sync", "exchanges": 2}),
    "momentum": (MOMENTUM, {"mode": gg.Sync(momentum=0.9), "exchanges": 2, "average_every": 5}),
    "state": (ADAMW, {"payload": gg.WeightsAndState(every=2), "average_every": 3}),
    "local steps": (MOMENTUM, {"local_steps": 2}),
}
EQUAL = {  # what keeps the replicas of an island equal
    "stale": (MOMENTUM, {"mode": "stale"}),
    "mask": (MOMENTUM, {"compress": gg.SharedMask(0.4)}),
    "narrow wire": (MOMENTUM, {"wire_dtype": torch.bfloat16}),
}


def batch(island, index, step):
    generator = torch.Generator().manual_seed(1000 * island + 10 * index + step)
    return torch.randn(5, 6, generator=generator)


def train(model, optimizer, session, inputs):
    """Steps of two passes and a clipping each; what the replica and the consensus are then."""
    for step in range(STEPS):
        with session.no_sync():
            model(inputs(step)).square().mean().backward()
        model(inputs(step + 500)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    session.wait()
    own = flat(model)
    distance = session.consensus_distance()
    with session.consensus():
        return [own, flat(model), torch.tensor([distance])]


def gathered(tensor, group):
    every = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(every, tensor, group=group)
    return every


def check_equal(model, group):
    first, *others = gathered(flat(model), group)
    assert all(torch.equal(first, each) for each in others)


def made(mesh, optimizer, dtype=torch.float32, seed=0, ddp=False, **settings):
    model = network(seed, dtype)
    if ddp:
        model = DistributedDataParallel(model, process_group=mesh["node"].get_group())
    optimizer = optimizer(model.parameters())
    settings = {"bucket_bytes": 100, "mesh": mesh["gossip"], "island": mesh["node"], **settings}
    return model, optimizer, gg.gossip(model, optimizer, **settings)


def islands_of(rank, store, islands, size):
    """What each exact setting ends with, after checks of the others."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (islands, size), mesh_dim_names=("gossip", "node"))
    inside = mesh["node"].get_group()
    island, index = divmod(rank, size)

    def inputs(step):
        return batch(island, index, step)

    found = {}
    for name, (optimizer, settings) in EXACT.items():
        # Seeds differ: the session makes the replicas equal.
        model, optimizer, session = made(mesh, optimizer, seed=rank, ddp=name == "sync", **settings)
        with session:
            found[name] = [each.tolist() for each in train(model, optimizer, session, inputs)]
            check_equal(model, inside)
            assert session.stats().outcomes["late"] == session.stats().outcomes["void"] == 0
            sent_bytes = session.stats().bytes_sent
            assert 0 < sent_bytes <= 1.5 * 4 * len(flat(model)) * 5 * STEPS / size
            dist.barrier()
    for optimizer, settings in EQUAL.values():
        model, optimizer, session = made(mesh, optimizer, **settings)
        with session:
            _, consensus, _ = train(model, optimizer, session, inputs)
            check_equal(model, inside)
            position = torch.tensor([session.position])
            assert all(torch.equal(each, position) for each in gathered(position, inside))
            session.average_()
            assert torch.allclose(flat(model), consensus, atol=1e-6)
            dist.barrier()
    check_odd_parameters(mesh, inputs, index)
    check_narrow_weights(mesh, inputs)
    check_late_slices(mesh, index)
    check_states(mesh, inputs)
    return found


def check_odd_parameters(mesh, inputs, index):
    """A layer that one rank uses, one that none uses, and one that is frozen at first."""
    model = network()
    one, none, frozen = (nn.Linear(6, 3) for _ in range(3))
    model.extend([nn.ModuleList([one, none, frozen])])
    frozen.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    with gg.gossip(
        model, optimizer, bucket_bytes=100, mesh=mesh["gossip"], island=mesh["node"]
    ) as session:
        start = none.weight.detach().clone()
        for step in range(STEPS):
            x = inputs(step)
            loss = model[:3](x).square().mean()
            if index == 0:
                loss = loss + one(x).square().mean()
            if step > 3:
                frozen.requires_grad_(True)
                loss = loss + frozen(x).square().mean()
            loss.backward()
            assert one.weight.grad is not None
            assert none.weight.grad is None
            optimizer.step()
            optimizer.zero_grad()
            check_equal(model, mesh["node"].get_group())
        # Without a gradient it does not decay; a mean of three equal values rounds.
        assert torch.allclose(none.weight, start, rtol=1e-5)
        assert session.stats().averages >= 1  # as the set of trained parameters grew
        dist.barrier()


def check_narrow_weights(mesh, inputs):
    """bf16 weights: the mean over islands is kept with their residuals."""
    model, optimizer, session = made(
        mesh, partial(torch.optim.SGD, lr=0.0), torch.bfloat16, average_every=None
    )
    with session, torch.no_grad():
        for p in model.parameters():
            p.add_(mesh["gossip"].get_local_rank() * 0.37)
        with session.consensus():
            before, distance = flat(model), session.consensus_distance()
        for step in range(STEPS):
            model(inputs(step).bfloat16())
            optimizer.step()
        check_equal(model, mesh["node"].get_group())
        with session.consensus():
            assert session.consensus_distance() < distance / 2
            assert torch.allclose(flat(model), before, atol=0.01)
        dist.barrier()


def check_late_slices(mesh, index):
    """A slice that is late is mixed when it comes, in the whole island; the mean is kept."""
    faults = Faults.parse("delay rank=0 rounds=1-3 seconds=0.3" if index else "")
    still = partial(torch.optim.SGD, lr=0.0)
    for mode in (gg.Stale(), gg.Overlap(patience_seconds=0.01)):
        model, optimizer, session = made(
            mesh,
            still,
            mode=mode,
            transport=lambda group: FaultyTransport(TCPTransport(group), faults),
        )
        with session, torch.no_grad():
            for p in model.parameters():
                p.add_(mesh["gossip"].get_local_rank())
            with session.consensus():
                before = flat(model)
            for step in range(STEPS):
                model(torch.ones(1, 6))
                optimizer.step()
                check_equal(model, mesh["node"].get_group())
                if step in (1, 4):
                    with session.consensus():
                        after = flat(model)
                    check_equal(model, mesh["node"].get_group())
                if step == 2:
                    session.state_dict(drain=True)
            session.average_()
            check_equal(model, mesh["node"].get_group())
            if isinstance(mode, gg.Stale):  # another mode may give up what is too late
                assert torch.allclose(after, before, atol=1e-5)
                assert torch.allclose(flat(model), before, atol=1e-5)
            dist.barrier()


def check_states(mesh, inputs):
    """A run that is resumed equals one that was not, bit for bit; one rank gets the consensus."""

    def run(session, model, optimizer, first, last):
        for step in range(first, last):
            model(inputs(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    ends = []
    state = None
    for resumes in (False, True):
        model, optimizer, session = made(mesh, ADAMW, local_steps=2)
        with session:
            if resumes:
                session.load_state_dict(state)
            else:
                run(session, model, optimizer, 0, 4)
                state = session.state_dict()
            run(session, model, optimizer, 4, 9)
            session.broadcast_() if not resumes else None
            weights = session.consensus_state_dict()
            assert (weights is not None) == (dist.get_rank() == 0)
            dist.barrier()
            if resumes:
                session.broadcast_()
            ends.append(flat(model))
    assert torch.equal(*ends)


def whole_replicas(islands, size, optimizer, settings):
    def use(me):
        def inputs(step):
            return torch.cat([batch(me.rank, index, step) for index in range(size)])

        return train(me.model, me.optimizer, me.session, inputs)

    return run_sessions(islands, use, optimizer=optimizer, bucket_bytes=100, **settings)


@pytest.mark.parametrize(
    ("islands", "size"), [(2, 2), (3, 2), pytest.param(2, 3, marks=pytest.mark.slow)]
)
def test_islands_train_like_ranks_with_their_batch(islands, size):
    found = run_processes(islands * size, islands_of, islands, size)
    for name, (optimizer, settings) in EXACT.items():
        expected = whole_replicas(islands, size, optimizer, settings)
        for rank, ours in enumerate(found):
            for mine, other in zip(ours[name], expected[rank // size], strict=True):
                assert mine == pytest.approx(other.tolist(), rel=1e-4, abs=2e-6), name


UNEQUAL = EXACT | {"stale": EQUAL["stale"], "narrow wire": EQUAL["narrow wire"]}


def unequal_islands(rank, store, sizes):
    """What each setting ends with; ranks beyond the smallest island exchange nothing."""
    starts = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    groups = {}
    for island, size in enumerate(sizes):
        groups["island", island] = dist.new_group(range(starts[island], starts[island] + size))
    for index in range(max(sizes)):
        ranks = [start + index for start, size in zip(starts, sizes, strict=False) if index < size]
        if index < min(sizes):
            groups["between", index] = dist.new_group(ranks)
        else:
            for one in ranks:
                groups["alone", one] = dist.new_group([one])
    (island,) = (n for n, start in enumerate(starts[:-1]) if start <= rank < starts[n + 1])
    index, inside = rank - starts[island], groups["island", island]
    between = groups.get(("between", index)) or groups["alone", rank]

    def inputs(step):
        return batch(island, index, step)

    found = {}
    for name, (optimizer, settings) in UNEQUAL.items():
        model = network(rank)
        optimizer = optimizer(model.parameters())
        with gg.gossip(
            model, optimizer, process_group=between, island=inside, bucket_bytes=100, **settings
        ) as session:
            assert (session.rank, session.world_size) == (island, len(sizes))
            session.load_state_dict(session.state_dict())
            found[name] = [each.tolist() for each in train(model, optimizer, session, inputs)]
            check_equal(model, inside)
            assert session.agree(island) == [*range(len(sizes))]
            session.average_()
            check_equal(model, inside)
            mine = flat(model)
            assert all(
                torch.allclose(each, mine, atol=1e-6) for each in gathered(mine, dist.group.WORLD)
            )
            dist.barrier()
    check_weights(island, inside, between, sizes)
    return found


def check_weights(island, inside, between, sizes):
    """Islands that count by their sizes keep that mean, and have it as the consensus."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if inside.size() > 1:
        alone, weight = gg.Group(dist.HashStore(), 0, 1), 1 + inside.rank()
        with pytest.raises(ValueError, match="the weights of an island are"):
            gg.gossip(model, optimizer, process_group=alone, island=inside, weight=weight)
    settings = {"process_group": between, "island": inside, "weight": sizes[island]}
    with gg.gossip(model, optimizer, bucket_bytes=100, **settings) as session:
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(float(island))
        for _ in range(5):
            model(torch.ones(1, 6)).square().mean().backward()
            optimizer.step()
        mean = sum(n * size for n, size in enumerate(sizes)) / sum(sizes)
        for each in model.parameters():
            assert torch.allclose(each, torch.full_like(each, mean))  # two islands meet at once
        with session.consensus():
            assert torch.allclose(flat(model), torch.full_like(flat(model), mean))
        dist.barrier()


@pytest.mark.parametrize("sizes", [(2, 1), pytest.param((3, 2), marks=pytest.mark.slow)], ids=str)
def test_islands_of_unequal_sizes_train_like_ranks_with_their_batches(sizes):
    found = run_processes(sum(sizes), unequal_islands, sizes)
    islands = [island for island, size in enumerate(sizes) for _ in range(size)]

    def use(me):
        def inputs(step):
            return torch.cat([batch(me.rank, index, step) for index in range(sizes[me.rank])])

        return train(me.model, me.optimizer, me.session, inputs)

    for name, (optimizer, settings) in EXACT.items():
        expected = run_sessions(len(sizes), use, optimizer=optimizer, bucket_bytes=100, **settings)
        for ours, island in zip(found, islands, strict=True):
            for mine, other in zip(ours[name], expected[island], strict=True):
                assert mine == pytest.approx(other.tolist(), rel=1e-4, abs=2e-6), name
