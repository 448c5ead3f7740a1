"""Gossip: every step mixes each replica with that of one rotating partner."""

from gossipgrad.decentralized._adamw import GossipAdamW as GossipAdamW
from gossipgrad.decentralized._average_states import average_states as average_states
from gossipgrad.decentralized._gossip import gossip as gossip
from gossipgrad.decentralized._join import join as join
from gossipgrad.decentralized._options import CheckedOptions as CheckedOptions
from gossipgrad.decentralized._options import GossipOptions as GossipOptions
from gossipgrad.decentralized._options import resolve_settings as resolve_settings
from gossipgrad.decentralized._outer import Nesterov as Nesterov
from gossipgrad.decentralized._session import GossipSession as GossipSession
from gossipgrad.decentralized._settings import GossipSettings as GossipSettings
from gossipgrad.decentralized._settings import Gradients as Gradients
from gossipgrad.decentralized._settings import GradientsAndWeights as GradientsAndWeights
from gossipgrad.decentralized._settings import Payload as Payload
from gossipgrad.decentralized._settings import Weights as Weights
from gossipgrad.decentralized._settings import WeightsAndState as WeightsAndState
from gossipgrad.decentralized._settings import check_moments as check_moments
from gossipgrad.decentralized._settings import resolve_compress as resolve_compress
from gossipgrad.decentralized._settings import resolve_payload as resolve_payload
from gossipgrad.decentralized._settings import travels as travels
