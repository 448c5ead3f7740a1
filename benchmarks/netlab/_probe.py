"""Which kinds of links and queues the kernel lacks."""

from ._errors import NetlabError
from ._record import allocate, locked
from ._sweep import dismantle, sweep_locked
from ._system import run

__all__ = ["lacking_features", "probe"]


def probe() -> list[str]:
    """Tries them out in a namespace made for it; a sentence for each that is missing."""
    with locked():
        sweep_locked()
        record = allocate(["probe"])
    try:
        run("ip", "netns", "add", record.namespaces[0])
        return lacking_features(record.namespaces[0])
    except NetlabError as error:
        return [f"no network namespace can be made here: {error}"]
    finally:
        dismantle(record)


def lacking_features(namespace: str) -> list[str]:
    """Kinds of links and queues that the kernel lacks; tried out in a `namespace` of ours."""
    trials = {
        "virtual Ethernet pairs (CONFIG_VETH)": "ip link add trial0 type veth peer name trial1",
        "bridges (CONFIG_BRIDGE)": "ip link add trial2 type bridge",
        "the token bucket queue htb (CONFIG_NET_SCH_HTB)": (
            "tc qdisc add dev lo root handle 1: htb default 1"
        ),
        "TCP's cubic (CONFIG_TCP_CONG_CUBIC)": (
            "ip route add local 192.0.2.0/24 dev lo congctl cubic"
        ),
    }
    lacks = []
    for name, trial in trials.items():
        command, *words = trial.split()
        try:
            run(command, "-n", namespace, *words)
        except NetlabError as error:
            lacks.append(f"the kernel or iproute2 lacks {name}: {error}")
    return lacks
