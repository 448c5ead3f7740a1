"""Many ranks without many machines: virtual ranks in one process."""

from ._record import record_profile as record_profile
from ._virtual_ranks import VirtualRanks as VirtualRanks
