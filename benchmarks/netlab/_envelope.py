"""How many bits a second a machine can carry on all links together."""

from ._errors import NetlabError
from ._rates import format_rate

__all__ = ["MOST_BITS_PER_SECOND", "check_load"]

# Measured with 2 cores at 2.5 GHz: 16 hosts at 1 Gbit/s full duplex carry 955 Mbit/s of payload
# each way, which is all of it; 32 hosts carry 750. `verify` says where a machine carries less.
MOST_BITS_PER_SECOND = 16e9


def check_load(load: float, hosts: int, asked: float | None, others: float = 0.0) -> None:
    """Refuses what the machine cannot carry.

    Args:
        load: Bits a second that the hosts can move together.
        hosts: How many they are.
        asked: What the machine is said to carry; None is `MOST_BITS_PER_SECOND`.
        others: What other laboratories can move meanwhile.

    Raises:
        NetlabError: With the reason.
    """
    limit = MOST_BITS_PER_SECOND if asked is None else asked
    if load + others > limit * 1.001:
        beside = f", other laboratories that are up {format_rate(others)}" if others else ""
        way_out = "Take fewer hosts or lower rates" + ", or wait for the others" * bool(others)
        said = f"{hosts} hosts at {format_rate(load / hosts)} on average can move"
        raise NetlabError(
            f"{said} {format_rate(load)} together{beside}, and this machine carries "
            f"{format_rate(limit)}: above, processors and not links would set the pace. {way_out}"
        )
