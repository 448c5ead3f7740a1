"""A launcher of worker processes in which the others survive the death of one."""

from ._fork_server import ensure_fork_server as ensure_fork_server
from ._launch import SOME_LOST as SOME_LOST
from ._launch import Echoes as Echoes
from ._launch import Launched as Launched
from ._launch import launch as launch
from ._rendezvous import Rendezvous as Rendezvous
from ._worker import Exit as Exit
from ._worker import Worker as Worker
