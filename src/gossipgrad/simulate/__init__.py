"""Runs that are not there: virtual ranks in one process, and how long steps take at any scale."""

from ._advise import Advice as Advice
from ._advise import Choice as Choice
from ._advise import advise as advise
from ._collective_steps import AllReduce as AllReduce
from ._collective_steps import Local as Local
from ._collective_steps import Sparse as Sparse
from ._gossip_steps import Gossip as Gossip
from ._gossip_steps import Suda as Suda
from ._model import Setting as Setting
from ._model import Steps as Steps
from ._model import Strategy as Strategy
from ._model import Workers as Workers
from ._network import Network as Network
from ._predict import STRATEGIES as STRATEGIES
from ._predict import Prediction as Prediction
from ._predict import predict as predict
from ._probe import SIZES_BYTES as SIZES_BYTES
from ._probe import Measured as Measured
from ._probe import Probe as Probe
from ._probe import check_sizes as check_sizes
from ._probe import probe as probe
from ._record import record_profile as record_profile
from ._suda_ranks import SudaRanks as SudaRanks
from ._virtual_ranks import VirtualRanks as VirtualRanks
