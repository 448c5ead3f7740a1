"""Who meets whom in round t, and how well that mixes: pure arithmetic, nothing communicates."""

from ._among import among as among
from ._analysis import Analysis as Analysis
from ._analysis import analyse as analyse
from ._analysis import contraction as contraction
from ._analysis import diffusion as diffusion
from ._analysis import is_doubly_stochastic as is_doubly_stochastic
from ._analysis import mixing_product as mixing_product
from ._analysis import rounds_until_all_know_all as rounds_until_all_know_all
from ._analysis import spectral_gap as spectral_gap
from ._by_name import SCHEDULE_NAMES as SCHEDULE_NAMES
from ._by_name import by_name as by_name
from ._complete import complete as complete
from ._dissemination import dissemination as dissemination
from ._given import from_graph as from_graph
from ._given import from_matrix as from_matrix
from ._hypercube import hypercube as hypercube
from ._matching import matching as matching
from ._relabelling import splitmix64 as splitmix64
from ._ring import ring as ring
from ._schedule import Peers as Peers
from ._schedule import RoundPeers as RoundPeers
from ._schedule import Schedule as Schedule
