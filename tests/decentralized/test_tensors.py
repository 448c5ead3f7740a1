"""Whatever a model or optimizer holds: the right tensors travel, others are refused by name."""

from functools import partial

import pytest
import torch
from torch import nn

import gossipgrad as gg
from support.ranks import run_ranks
from support.replicas import network, set_gradients, transport_by_name

WAY_OUT = r"zero_grad\(set_to_none=True\) and step\(\); the partner mixes what was sent"
OPTIMIZERS = {
    "plain SGD": partial(torch.optim.SGD, lr=0.1),
    "AMSGrad": partial(torch.optim.Adam, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, fused=True),
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "Adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_with_its_state_in_the_payload(name):
    link = transport_by_name("in-process", 3)

    def rank_main(rank, group):
        model = network()
        optimizer = OPTIMIZERS[name](model.parameters())
        with gg.gossip(
            model, optimizer, process_group=group, payload="weights+state", transport=link
        ) as session:
            for step in range(8):
                set_gradients(model, rank, step)
                optimizer.step()
            session.average_()
            held = [t.clone() for s in optimizer.state.values() for t in s.values()]
        assert all(torch.isfinite(p).all() for p in model.parameters())
        return held

    results = run_ranks(3, rank_main)
    for key in zip(*results, strict=True):
        if key[0].ndim and name != "Adafactor":
            assert torch.equal(key[0], key[1])


def test_an_optimizer_that_needs_a_closure_is_refused_with_state_and_works_without():
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(gg.GossipError, match=r"LBFGS .* use payload='weights'"):
        gg.gossip(model, optimizer, payload="weights+state")
    with gg.gossip(model, optimizer):

        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(2, 6)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


class Odd(nn.Module):
    """Tied, frozen, empty, mixed in type, never used, and laid out channels-last."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 6, bias=False)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.embed.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.wide = nn.Linear(6, 6).double()
        self.unused = nn.Linear(6, 6)
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.narrow = nn.Parameter(torch.zeros(6, dtype=torch.bfloat16))

    def forward(self, x):
        hidden = self.frozen(self.tied(self.embed(x))) + self.narrow.float()
        image = self.conv(x[:, :1, None, None].expand(-1, 2, 3, 3))
        return self.wide(hidden.double()).float() + image.flatten(1).sum(1, keepdim=True)


@pytest.mark.parametrize("payload", ["weights", "weights+state", "gradients+weights"])
@pytest.mark.parametrize("mode", ["overlap", "sync"])
def test_odd_models(payload, mode):
    if payload.startswith("gradients") and mode == "sync":
        pytest.skip("payloads with gradients have one order only")
    link = transport_by_name("in-process", 3)

    def rank_main(rank, group):
        model = Odd()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        with gg.gossip(
            model,
            optimizer,
            process_group=group,
            payload=payload,
            mode=mode,
            transport=link,
            bucket_bytes=64,
        ) as session:
            frozen = model.frozen.weight.clone()
            unused = model.unused.weight.detach().clone()
            for step in range(6):
                generator = torch.Generator().manual_seed(10 * rank + step)
                optimizer.zero_grad()
                model(torch.randn(4, 6, generator=generator)).square().mean().backward()
                optimizer.step()
            assert model.unused.weight.grad is None
            assert model.unused.weight not in optimizer.state
            torch.testing.assert_close(model.unused.weight.detach(), unused, rtol=0, atol=1e-6)
            assert torch.equal(model.frozen.weight, frozen)
            assert model.tied.weight is model.embed.weight
            assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
            session.average_()
            return [p.detach().clone() for p in model.parameters()]

    results = run_ranks(3, rank_main)
    for mine, other in zip(results[0], results[1], strict=True):
        assert torch.equal(mine, other)


def test_a_parameter_used_on_some_ranks_only():
    """As in conditional computation: a rank without a gradient has no state, and stays so."""
    link = transport_by_name("in-process", 2)

    def rank_main(rank, group):
        model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        optimizer = torch.optim.Adam(model.parameters())
        with gg.gossip(
            model, optimizer, process_group=group, payload="weights+state", transport=link
        ):
            for _ in range(5):
                optimizer.zero_grad()
                branch = model[0] if rank == 0 else model[1]
                branch(torch.ones(1, 3)).sum().backward()
                optimizer.step()
            assert len(optimizer.state) == 2
            group.barrier()
        assert all(torch.isfinite(p).all() for p in model.parameters())

    run_ranks(2, rank_main)


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (partial(torch.optim.Adam, betas=(0.1, 0.1)), "exp_avg_sq"),
        (partial(torch.optim.RMSprop, alpha=0.1), "square_avg"),
        (partial(torch.optim.Adamax, betas=(0.1, 0.1)), "exp_inf"),
    ],
)
def test_second_moments_never_become_negative(make, key):
    """Second moments of very unequal ranks; the clamps are counted."""
    link = transport_by_name("in-process", 2)

    def rank_main(rank, group):
        model = nn.Linear(4, 4)
        optimizer = make(model.parameters())
        with gg.gossip(
            model, optimizer, process_group=group, payload="weights+state", transport=link
        ) as session:
            for step in range(30):
                scale = 100.0 if step % 4 == rank else 0.0
                for p in model.parameters():
                    p.grad = torch.full_like(p, scale)
                optimizer.step()
                for state in optimizer.state.values():
                    assert (state[key] >= 0).all()
            group.barrier()
            return session.stats().clamps

    assert sum(run_ranks(2, rank_main)) > 0


def test_backward_passes_of_a_step_add_up_or_train_other_parameters():
    """A gradient after its bucket was sent is an error that says what to do."""
    link = transport_by_name("in-process", 2)

    def rank_main(rank, group):
        model = nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 1)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.ones(1, 6)
        with gg.gossip(
            model,
            optimizer,
            process_group=group,
            payload="gradients+weights",
            transport=link,
            bucket_bytes=32,  # one for each layer
        ) as session:
            with session.no_sync():
                model[0](x * rank).sum().backward()
            model[0](x).sum().backward()
            model[1](x * rank).sum().backward()
            optimizer.step()
            assert (model[0].weight.grad == 1.5).all()
            assert (model[1].weight.grad == 0.5).all()
            optimizer.zero_grad()
            model[0](x).sum().backward()
            with pytest.raises(gg.GossipError, match=r"session\.no_sync.*" + WAY_OUT):
                model[0](x).sum().backward()
            group.barrier()

    run_ranks(2, rank_main)


def test_gradients_are_clipped_after_they_are_mixed():
    link = transport_by_name("in-process", 2)

    def rank_main(rank, group):
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with gg.gossip(
            model, optimizer, process_group=group, payload="gradients+weights", transport=link
        ) as session:
            (model.weight.sum() * (100.0 - 50 * rank)).backward()
            session.synchronize()
            assert model.weight.grad.item() == 75.0
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            assert model.weight.grad.item() == pytest.approx(1.0, rel=1e-4)
            optimizer.zero_grad()
            (model.weight.sum() * (100.0 - 50 * rank)).backward()
            model.weight.grad = model.weight.grad * 0.5
            for attempt in (optimizer.step, session.synchronize, optimizer.step):
                written = r"'weight' was written after it was sent.*" + WAY_OUT
                with pytest.raises(gg.GossipError, match=written):
                    attempt()
            optimizer.zero_grad(set_to_none=True)  # the way out that the error names
            optimizer.step()
            group.barrier()

    run_ranks(2, rank_main)


def test_a_wire_of_fp16_holds_no_infinity():
    link = transport_by_name("in-process", 2)

    def rank_main(rank, group):
        model = nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[1e5, -3e38]]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with gg.gossip(
            model, optimizer, process_group=group, wire_dtype=torch.float16, transport=link
        ):
            model.weight.grad = torch.zeros_like(model.weight)
            optimizer.step()
            group.barrier()
        return model.weight.tolist()

    assert run_ranks(2, rank_main) == [[[pytest.approx(1e5), pytest.approx(-3e38)]]] * 2


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex64))]),
            r"'0' is complex \(torch.complex64\): train torch.view_as_real",
        ),
        (
            lambda: nn.ParameterList([nn.Parameter(torch.zeros(2).to_sparse())]),
            "'0' is sparse",
        ),
    ],
)
def test_what_has_no_average_is_refused_by_name(build, message):
    model = build()
    optimizer = torch.optim.SGD(list(model.parameters()), lr=0.1)
    with pytest.raises(ValueError, match=message):
        gg.gossip(model, optimizer)


def test_sparse_gradients_are_refused_only_where_gradients_travel():
    link = [transport_by_name("in-process", 2) for _ in range(2)]

    def rank_main(rank, group):
        for number, payload in enumerate(("weights", "gradients+weights")):
            model = nn.Embedding(4, 3, sparse=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            own = gg.Group(torch.distributed.PrefixStore(payload, group.store), rank, 2)
            with gg.gossip(
                model, optimizer, process_group=own, payload=payload, transport=link[number]
            ):
                loss = model(torch.tensor([1])).sum()
                if payload == "weights":
                    loss.backward()
                    optimizer.step()
                else:
                    with pytest.raises(ValueError, match="'weight' is sparse"):
                        loss.backward()
                own.barrier()

    run_ranks(2, rank_main)
