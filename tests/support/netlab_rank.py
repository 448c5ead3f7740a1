"""A rank on a host of the network laboratory: an all-reduce and a session, both over its link."""

import json
import sys
import time

import torch
import torch.distributed as dist

import gossipgrad as gg

ELEMENTS = 250_000
STEPS = 3


def main(transport: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    values = torch.full((ELEMENTS,), float(rank))
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(values)
    all_reduce_seconds = time.perf_counter() - start
    torch.manual_seed(rank)
    model = torch.nn.Linear(500, ELEMENTS // 500, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gg.gossip(model, optimizer, transport=transport) as session:
        for _ in range(STEPS):
            model(torch.ones(1, 500)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        outcomes = session.stats().outcomes
        with session.consensus():
            mean = model.weight.sum().item()
    print(json.dumps([values[0].item(), all_reduce_seconds, outcomes, mean]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
