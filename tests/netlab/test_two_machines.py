"""README's ways to start a run on two machines of one name, each here a network namespace."""

import os
import subprocess
import sys

import pytest

from benchmarks.network import Network, _namespaces
from benchmarks.network._links import INTERFACE
from support.waiting import HANG_SECONDS

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(bool(_namespaces.missing()), reason="; ".join(_namespaces.missing())),
]

SCRIPT = """
import torch, torch.distributed as dist
import gossipgrad as gg
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with gg.gossip(model, optimizer) as session:
    for _ in range(20):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with session.consensus():
        print("delivered", session.stats().outcomes["delivered"] > 0, model.weight.sum().item())
"""
WAYS = {
    "launch": ["gossipgrad", "launch", "--nodes", "2", "--rendezvous", "head:29500"],
    "torchrun": ["torch.distributed.run", "--nnodes", "2", "--master-addr", "head"],
}
# Debian's installer gives a machine's own name the address 127.0.1.1.
HOSTS = {
    "own address": ["10.64.0.1 worker head", "10.64.0.2 worker\n10.64.0.1 head"],
    "loopback": ["127.0.1.1 worker head", "127.0.1.1 worker\n10.64.0.1 head"],
    "IPv6": ["fd00::1 worker head", "fd00::2 worker\nfd00::1 head"],
}
# No name server: torch looks the peer of each connection up, and would wait 10 s for an answer.
AS_A_MACHINE = (
    'mount --bind "$0" /etc/hosts && mount --bind /dev/null /etc/resolv.conf && '
    'hostname worker && exec "$@"'
)


def run_on_both(tmp_path, way, hosts, **environment):
    """Runs `SCRIPT` on two machines called worker; exit codes and outputs."""
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT)
    with Network(hosts=2, rate_bits_per_second=1e8) as network:
        machines = []
        for node in range(2):
            lines = [f"route add default via {network.address(1 - node)}"]
            if hosts == "IPv6":
                lines = [f"addr flush dev {INTERFACE}"]
                lines += [f"addr add fd00::{node + 1}/64 dev {INTERFACE} nodad"]
            _namespaces.run(
                *("ip", "-n", network.namespace(node)),
                lines=[
                    *lines,
                    "link add unused0 type veth peer name unused1",
                    f"addr add 172.31.{node}.1/24 dev unused0",
                    "link set unused0 up",
                    "link set unused1 up",
                    f"route add blackhole 172.31.{1 - node}.0/24",
                ],
            )
            names = tmp_path / f"hosts{node}"
            names.write_text(f"127.0.0.1 localhost\n{HOSTS[hosts][node]}\n")
            command = [sys.executable, "-m", *WAYS[way], "--node-rank", str(node)]
            command += ["--nproc-per-node", "1", str(script)]
            machine = ["unshare", "--uts", "--mount", "sh", "-c", AS_A_MACHINE, str(names)]
            machines.append(
                network.popen(
                    node,
                    [*machine, *command],
                    env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        said = [machine.communicate(timeout=HANG_SECONDS)[0] for machine in machines]
        return [machine.returncode for machine in machines], said


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("way", WAYS)
def test_machines_of_one_name_train_together(tmp_path, way, hosts):
    codes, said = run_on_both(tmp_path, way, hosts)
    assert codes == [0, 0], "\n".join(said)
    consensus = {each.partition("delivered True ")[2].split()[0] for each in said}
    assert len(consensus) == 1


@pytest.mark.parametrize("way", WAYS)
def test_machines_that_do_not_reach_each_other_both_name_the_two_addresses(tmp_path, way):
    codes, said = run_on_both(tmp_path, way, "own address", GOSSIPGRAD_BIND="unused0")
    for code, each in zip(codes, said, strict=True):
        assert code != 0
        assert "172.31.0.1" in each
        assert "172.31.1.1" in each
        assert "GOSSIPGRAD_BIND" in each
