"""The ways to keep replicas together: one file a strategy, and one line of `_registry.py`."""

from ._all_reduce import AllReduceConfig as AllReduceConfig
from ._gossip import GossipConfig as GossipConfig
from ._registry import STRATEGIES as STRATEGIES
from ._registry import check_options as check_options
from ._registry import find as find
from ._registry import options_by_section as options_by_section
from ._registry import sections_of as sections_of
from ._sparse import SparseConfig as SparseConfig
from ._stopping import StopFlag as StopFlag
from ._strategy import GROUP as GROUP
from ._strategy import Joiner as Joiner
from ._strategy import Replica as Replica
from ._strategy import RunningStrategy as RunningStrategy
from ._strategy import Setting as Setting
from ._strategy import Strategy as Strategy
from ._strategy import Traffic as Traffic
from ._strategy import ring_bytes as ring_bytes
