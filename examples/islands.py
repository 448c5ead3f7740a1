"""Islands: the ranks of a machine share one replica, and machines exchange by gossip.

torchrun --nproc-per-node 4 examples/islands.py
gossipgrad launch --nproc 4 --island 2 --respawn 2 examples/islands.py --folder run

With several machines, each one island, run the second line on all of them, with --nodes,
--node-rank and --rendezvous, a shared --folder, and --ranks for the ranks of an island. One
that died comes back: its ranks join by the address that rank 0 has written to the folder.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

import gossipgrad as gg
from gossipgrad.data import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--ranks", type=int, default=2, help="of an island")
parser.add_argument("--folder", type=Path, default=Path("run"))
options = parser.parse_args()

dist.init_process_group("gloo")
x, y = load_digits()
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
address = options.folder / "address"
if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
    shape = dist.get_world_size() // options.ranks, options.ranks
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("gossip", "node"))
    session = gg.gossip(model, optimizer, mesh=mesh["gossip"], island=mesh["node"])
    if dist.get_rank() == 0:
        options.folder.mkdir(parents=True, exist_ok=True)
        address.write_text(session.join_address())
else:  # this island was started again, and its ranks alone are in the process group
    session = gg.join(model, optimizer, address.read_text(), island=dist.group.WORLD)

with session:
    torch.manual_seed(1000 * session.rank + dist.get_rank())  # each rank has its own samples
    while session.position < 200:
        rows = torch.randint(1500, (32,))
        cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    with session.consensus():
        accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean()
    weights = session.consensus_state_dict()
    if weights is not None:  # on one rank
        torch.save(weights, options.folder / "model.pt")
        print(f"accuracy of the consensus {accuracy:.1%}")
