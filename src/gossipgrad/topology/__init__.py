"""Schedules of partners by round, and analysis of their mixing, by pure arithmetic."""

from ._among import among as among
from ._analysis import Analysis as Analysis
from ._analysis import analyse as analyse
from ._analysis import diffusion as diffusion
from ._analysis import mixing_product as mixing_product
from ._analysis import rounds_until_all_know_all as rounds_until_all_know_all
from ._analysis import spectral_gap as spectral_gap
from ._given import from_graph as from_graph
from ._given import from_matrix as from_matrix
from ._repeated import repeated as repeated
from ._rotation import splitmix64 as splitmix64
from ._rules import SCHEDULE_NAMES as SCHEDULE_NAMES
from ._rules import by_name as by_name
from ._rules import complete as complete
from ._rules import dissemination as dissemination
from ._rules import hypercube as hypercube
from ._rules import matching as matching
from ._rules import ring as ring
from ._schedule import Peers as Peers
from ._schedule import RoundPeers as RoundPeers
from ._schedule import Schedule as Schedule
from ._weighted import Weighted as Weighted
from ._weighted import weighted as weighted
