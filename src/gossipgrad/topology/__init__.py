"""Who meets whom in round t, and how well that mixes: pure arithmetic, nothing communicates."""

from ._by_name import SCHEDULE_NAMES as SCHEDULE_NAMES
from ._by_name import by_name as by_name
from ._complete import complete as complete
from ._dissemination import dissemination as dissemination
from ._hypercube import hypercube as hypercube
from ._matching import matching as matching
from ._ring import ring as ring
from ._schedule import Peers as Peers
from ._schedule import RoundPeers as RoundPeers
from ._schedule import Schedule as Schedule
