"""Many ranks without many machines: virtual ranks in one process."""

from ._virtual_ranks import VirtualRanks as VirtualRanks
