"""The reference mixes optimizer state by the weights' rule, and leaves alone what is no state."""

import torch

from gossipgrad.decentralized._reference import Reference
from gossipgrad.topology import by_name
from support.vectors import assert_near, buffer, fill_gradients, replicas, sgd


def test_momentum_follows_the_weights_rule_in_its_rounds() -> None:
    models = replicas(2)
    optimizers = sgd(models, momentum=0.9)
    plain = replicas(2)
    plain_optimizers = sgd(plain, momentum=0.9)
    reference = Reference(
        models, optimizers, by_name("ring", 2), mode="sync", payload="weights+state", state_every=2
    )
    mine = torch.zeros(7)
    for step in range(2):
        fill_gradients(models, step)
        fill_gradients(plain, step)
        before = mine
        reference.step()
        for optimizer in plain_optimizers:
            optimizer.step()
        mine = buffer(optimizers[0], models[0].vector)
        if step == 0:
            local = [buffer(o, m.vector) for o, m in zip(plain_optimizers, plain, strict=True)]
            assert_near(mine, (local[0] + local[1]) / 2)
        else:
            assert_near(mine, 0.9 * before + models[0].vector.grad)


def test_second_moments_are_clamped_and_step_counters_stay() -> None:
    models = replicas(2)
    optimizers = [torch.optim.Adam(m.parameters(), betas=(0.9, 0.1)) for m in models]
    reference = Reference(models, optimizers, by_name("ring", 2), payload="weights+state")
    for step in range(4):
        fill_gradients(models, None)
        for w in models[0].parameters():
            w.grad.fill_(10.0 if step == 0 else 0.0)
        reference.step()
        for model, optimizer in zip(models, optimizers, strict=True):
            for w in model.parameters():
                assert buffer(optimizer, w, "exp_avg_sq").min() >= 0.0
                assert buffer(optimizer, w, "step") == step + 1
    assert reference.clamps > 0
