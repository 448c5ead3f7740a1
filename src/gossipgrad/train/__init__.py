"""The main job: one configuration, one loop, on local processes or in a world already started."""

from ._config import DEFAULT_LR as DEFAULT_LR
from ._config import TrainConfig as TrainConfig
from ._job import Job as Job
from ._job import JobError as JobError
from ._join import JoinConfig as JoinConfig
from ._join import JoinOutcome as JoinOutcome
from ._join import join_run as join_run
from ._progress import show_metric as show_metric
from ._result import Outcome as Outcome
from ._result import RunFailedError as RunFailedError
from ._resume import config_of_run as config_of_run
from ._run import run as run
from ._second_order import SecondOrderConfig as SecondOrderConfig
from ._world import World as World
from ._world import find_world as find_world
from ._world import open_store as open_store
from ._world import slurm_rendezvous as slurm_rendezvous
from .strategies import STRATEGIES as STRATEGIES
from .strategies import GossipConfig as GossipConfig
from .strategies import PostLocalConfig as PostLocalConfig
from .strategies import SparseConfig as SparseConfig
from .strategies import options_by_section as options_by_section
from .strategies import sections_of as sections_of
