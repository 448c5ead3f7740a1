"""The start: every kind of tensor becomes rank 0's, in few messages."""

import torch
from torch import nn

from gossipgrad.comm import Group, broadcast_replica
from support.ranks import run_ranks


class Mixed(nn.Module):
    """Parameters and buffers of many types and shapes, one of them larger than a message."""

    def __init__(self, rank):
        super().__init__()
        generator = torch.Generator().manual_seed(rank)

        def values(*shape, dtype=torch.float32):
            return (100 * torch.rand(shape, generator=generator)).to(dtype)

        self.many = nn.ParameterList(values(3, n) for n in range(1, 30))
        self.transposed = nn.Parameter(values(4, 6).t())
        self.narrow = nn.Parameter(values(5, dtype=torch.bfloat16))
        self.scalar = nn.Parameter(values())
        self.large = nn.Parameter(values(1100, 1000))
        self.register_buffer("flags", values(7) > 50)
        self.register_buffer("count", values(dtype=torch.int64))
        self.register_buffer("exact", values(3, dtype=torch.float64))
        self.register_buffer("empty", values(0, 4))


def test_every_tensor_becomes_rank_0s_in_few_messages(monkeypatch):
    messages = []
    plain = Group.broadcast_

    def counted(self, tensor, source=0):
        if self.rank == 1:
            messages.append(tensor.nbytes)
        return plain(self, tensor, source)

    monkeypatch.setattr(Group, "broadcast_", counted)

    def run(rank, group):
        model = Mixed(rank)
        optimizer = torch.optim.Adam(model.parameters())
        if rank == 0:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        addresses = [p.data_ptr() for p in model.parameters()]
        broadcast_replica(group, model, [optimizer])
        assert addresses == [p.data_ptr() for p in model.parameters()]
        assert model.transposed.stride() == (1, 6)
        return model.state_dict(), optimizer.state_dict()["state"]

    (first, first_state), *others = run_ranks(3, run)
    for state, optimizer_state in others:
        assert all(torch.equal(state[name], value) for name, value in first.items())
        assert all(state[name].dtype == value.dtype for name, value in first.items())
        for place, held in first_state.items():
            assert all(torch.equal(optimizer_state[place][key], held[key]) for key in held)
    # Weights: all before the large one, it, all behind it; state.
    assert len(messages) <= 4
