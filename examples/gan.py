"""A GAN: one session for each of its two models.

torchrun --nproc-per-node 4 examples/gan.py
"""

import torch
from torch import nn
from torch.distributed import init_process_group, is_torchelastic_launched
from torch.nn.functional import softplus

import gossipgrad as gg

if is_torchelastic_launched():
    init_process_group("gloo")

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.99))
of_critic = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.99))


def real(size: int) -> torch.Tensor:
    """Points around (2, -1)."""
    return torch.tensor([2.0, -1.0]) + 0.3 * torch.randn(size, 2)


with gg.gossip(critic, of_critic) as one, gg.gossip(generator, of_generator) as other:
    torch.manual_seed(1 + one.rank)  # each rank draws other samples
    for _ in range(400):
        made = generator(torch.randn(64, 4))
        loss = softplus(-critic(real(64))).mean() + softplus(critic(made.detach())).mean()
        loss.backward()
        of_critic.step()  # a round of the critic's session
        of_critic.zero_grad()
        softplus(-critic(made)).mean().backward()
        of_generator.step()  # a round of the generator's
        of_generator.zero_grad()
        of_critic.zero_grad()  # what the generator's loss left there
    with other.consensus(), torch.no_grad():
        centre = generator(torch.randn(4096, 4)).mean(0)

if one.rank == 0:
    print(f"centre of what the consensus makes ({centre[0]:.1f}, {centre[1]:.1f}), real (2, -1)")
