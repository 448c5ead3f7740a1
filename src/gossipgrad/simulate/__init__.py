"""Runs that are not there: virtual ranks in one process, and how long steps take at any scale."""

from ._collective_steps import AllReduce as AllReduce
from ._collective_steps import Local as Local
from ._collective_steps import PeriodicAverage as PeriodicAverage
from ._curves import Curves as Curves
from ._gossip_steps import Gossip as Gossip
from ._measuring import Measured as Measured
from ._network import Network as Network
from ._network import Racks as Racks
from ._predict import STRATEGIES as STRATEGIES
from ._predict import Prediction as Prediction
from ._predict import predict as predict
from ._predict import strategy_by_name as strategy_by_name
from ._probe import SIZES_BYTES as SIZES_BYTES
from ._probe import Probe as Probe
from ._probe import check_sizes as check_sizes
from ._probe import probe as probe
from ._record import record_profile as record_profile
from ._setting import Setting as Setting
from ._setting import Steps as Steps
from ._setting import Strategy as Strategy
from ._suda_ranks import SudaRanks as SudaRanks
from ._suda_steps import Suda as Suda
from ._virtual_ranks import VirtualRanks as VirtualRanks
from ._workers import Pace as Pace
from ._workers import Workers as Workers
