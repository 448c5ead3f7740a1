"""Train one PyTorch model on many workers over slow, uneven or unreliable networks, by gossip."""

from importlib.metadata import version as _version
from typing import TYPE_CHECKING as _TYPE_CHECKING

from gossipgrad import topology as topology
from gossipgrad._messages import show_warnings as _show_warnings
from gossipgrad.comm import Group as Group
from gossipgrad.comm import Heartbeats as Heartbeats
from gossipgrad.comm import Joining as Joining
from gossipgrad.comm import Loss as Loss
from gossipgrad.comm import Membership as Membership
from gossipgrad.comm import Outcome as Outcome
from gossipgrad.comm import load_replica as load_replica
from gossipgrad.comm import set_gloo_interface as _set_gloo_interface
from gossipgrad.compression import SharedMask as SharedMask
from gossipgrad.data import RingShuffle as RingShuffle
from gossipgrad.decentralized import GossipAdamW as GossipAdamW
from gossipgrad.decentralized import GossipSession as GossipSession
from gossipgrad.decentralized import Gradients as Gradients
from gossipgrad.decentralized import GradientsAndWeights as GradientsAndWeights
from gossipgrad.decentralized import Nesterov as Nesterov
from gossipgrad.decentralized import Weights as Weights
from gossipgrad.decentralized import WeightsAndState as WeightsAndState
from gossipgrad.decentralized import average_states as average_states
from gossipgrad.decentralized import gossip as gossip
from gossipgrad.decentralized import join as join
from gossipgrad.engine import Overlap as Overlap
from gossipgrad.engine import Stale as Stale
from gossipgrad.engine import Stats as Stats
from gossipgrad.engine import Sync as Sync
from gossipgrad.errors import AgreementError as AgreementError
from gossipgrad.errors import EvictedError as EvictedError
from gossipgrad.errors import GossipError as GossipError
from gossipgrad.errors import ReplicaChangedError as ReplicaChangedError

if _TYPE_CHECKING:
    from gossipgrad import apoptosis as apoptosis
    from gossipgrad import second_order as second_order
    from gossipgrad import simulate as simulate
    from gossipgrad import sparsification as sparsification
    from gossipgrad.apoptosis import Neurons as Neurons
    from gossipgrad.apoptosis import ShrinkPlan as ShrinkPlan
    from gossipgrad.apoptosis import ShrinkSession as ShrinkSession
    from gossipgrad.apoptosis import rebuild as rebuild
    from gossipgrad.apoptosis import shrink as shrink
    from gossipgrad.muon import Muon as Muon
    from gossipgrad.muon import SudaSession as SudaSession
    from gossipgrad.muon import SudaStats as SudaStats
    from gossipgrad.muon import suda as suda
    from gossipgrad.second_order import SOAP as SOAP
    from gossipgrad.second_order import KLShampoo as KLShampoo
    from gossipgrad.second_order import Refresh as Refresh
    from gossipgrad.second_order import Shampoo as Shampoo
    from gossipgrad.second_order import Tiers as Tiers
    from gossipgrad.second_order import share_roots as share_roots
    from gossipgrad.simulate import advise as advise
    from gossipgrad.simulate import predict as predict
    from gossipgrad.sparsification import SparseSession as SparseSession
    from gossipgrad.sparsification import SparseStats as SparseStats
    from gossipgrad.sparsification import sparsify as sparsify
else:
    from gossipgrad._lazy import __getattr__ as __getattr__

_show_warnings()
_set_gloo_interface()

__version__ = _version("gossipgrad")
