"""Merged gradient sparsification: send the largest elements, carry the rest over."""

from gossipgrad.sparsification._ddp import CommHook as CommHook
from gossipgrad.sparsification._ddp import ddp_hook as ddp_hook
from gossipgrad.sparsification._density import Density as Density
from gossipgrad.sparsification._density import Warmup as Warmup
from gossipgrad.sparsification._session import SparseSession as SparseSession
from gossipgrad.sparsification._session_state import deal_states as deal_states
from gossipgrad.sparsification._sparsify import sparsify as sparsify
from gossipgrad.sparsification._stats import GroupStats as GroupStats
from gossipgrad.sparsification._stats import SparseStats as SparseStats
