"""Gossip: every step mixes each replica with that of one rotating partner."""

from gossipgrad.decentralized._average_states import average_states as average_states
from gossipgrad.decentralized._compress import resolve_compress as resolve_compress
from gossipgrad.decentralized._data_parallel import GossipDataParallel as GossipDataParallel
from gossipgrad.decentralized._gossip import check_settings as check_settings
from gossipgrad.decentralized._gossip import gossip as gossip
from gossipgrad.decentralized._join import join as join
from gossipgrad.decentralized._modes import Mode as Mode
from gossipgrad.decentralized._modes import Overlap as Overlap
from gossipgrad.decentralized._modes import Stale as Stale
from gossipgrad.decentralized._modes import Sync as Sync
from gossipgrad.decentralized._modes import check_never_waits as check_never_waits
from gossipgrad.decentralized._modes import resolve_mode as resolve_mode
from gossipgrad.decentralized._session import GossipSession as GossipSession
from gossipgrad.decentralized._settings import Gradients as Gradients
from gossipgrad.decentralized._settings import GradientsAndWeights as GradientsAndWeights
from gossipgrad.decentralized._settings import Payload as Payload
from gossipgrad.decentralized._settings import Weights as Weights
from gossipgrad.decentralized._settings import WeightsAndState as WeightsAndState
from gossipgrad.decentralized._settings import resolve_average_every as resolve_average_every
from gossipgrad.decentralized._settings import resolve_payload as resolve_payload
from gossipgrad.decentralized._stats import Stats as Stats
from gossipgrad.decentralized._tensors import NON_NEGATIVE as NON_NEGATIVE
