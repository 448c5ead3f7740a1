"""Gossip: every step mixes each replica with that of one rotating partner."""

from gossipgrad.decentralized._data_parallel import GossipDataParallel as GossipDataParallel
from gossipgrad.decentralized._gossip import gossip as gossip
from gossipgrad.decentralized._gossip import resolve_group as resolve_group
from gossipgrad.decentralized._session import GossipSession as GossipSession
from gossipgrad.decentralized._settings import Gradients as Gradients
from gossipgrad.decentralized._settings import GradientsAndWeights as GradientsAndWeights
from gossipgrad.decentralized._settings import Lagged as Lagged
from gossipgrad.decentralized._settings import Overlap as Overlap
from gossipgrad.decentralized._settings import Sync as Sync
from gossipgrad.decentralized._settings import Weights as Weights
from gossipgrad.decentralized._settings import WeightsAndState as WeightsAndState
from gossipgrad.decentralized._stats import Stats as Stats
