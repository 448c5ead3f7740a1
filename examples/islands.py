r"""Islands: the ranks of a node share one replica, and nodes exchange by gossip.

    torchrun --nproc 4 examples/islands.py --ranks 2
    gossipgrad launch --nproc 4 --island 2 --respawn 2 examples/islands.py --ranks 2 --folder run

With several machines, one island each, start on all of them, with their --node-rank:

    gossipgrad launch --nodes 3 --node-rank 0 --rendezvous 10.0.0.1:29500 --nproc 4 --island 4 \
        --respawn 2 examples/islands.py --ranks 4 --folder /shared/run

An island that died comes back: its ranks join by the address that rank 0 has written.

The task is to learn a random linear map; put your model, data and loss in its place.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import gossipgrad as gg


def main() -> None:
    """Train, and let the first rank save the consensus."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="ranks of an island")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--folder", type=Path, default=Path("run"))
    options = parser.parse_args()
    is_cuda = torch.cuda.is_available()
    if is_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = "cuda" if is_cuda else "cpu"
    dist.init_process_group("nccl" if is_cuda else "gloo")
    model = torch.nn.Linear(32, 8).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    address = options.folder / "address"
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        shape = dist.get_world_size() // options.ranks, options.ranks
        mesh = init_device_mesh(device, shape, mesh_dim_names=("gossip", "node"))
        session = gg.gossip(model, optimizer, mesh=mesh["gossip"], island=mesh["node"])
        if dist.get_rank() == 0 and session.world_size > 1:
            options.folder.mkdir(parents=True, exist_ok=True)
            address.write_text(session.join_address())
    else:  # this island was started again, and is alone in the process group
        session = gg.join(model, optimizer, address.read_text(), island=dist.group.WORLD)
    truth = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    own = torch.Generator().manual_seed(1 + 1000 * session.rank + dist.get_rank())
    with session:
        while session.position < options.steps:
            x = torch.randn(64, 32, generator=own)
            loss = (model(x.to(device)) - (x @ truth).to(device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"island {session.rank}: loss {loss.item():.4f}", flush=True)
        weights = session.consensus_state_dict()
        if weights is not None:
            options.folder.mkdir(parents=True, exist_ok=True)
            torch.save(weights, options.folder / "model.pt")


if __name__ == "__main__":
    main()
