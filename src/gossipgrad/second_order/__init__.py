"""Second-order optimizers whose roots are computed in the background and whose state has tiers."""

from gossipgrad.second_order._refresh import Background as Background
from gossipgrad.second_order._refresh import Deterministic as Deterministic
from gossipgrad.second_order._refresh import Refresher as Refresher
from gossipgrad.second_order._refresh import RefreshStats as RefreshStats
from gossipgrad.second_order._refresh import Root as Root
from gossipgrad.second_order._refresh import Staggered as Staggered
from gossipgrad.second_order._refresh import Synchronous as Synchronous
from gossipgrad.second_order._tiers import Store as Store
from gossipgrad.second_order._tiers import StoreStats as StoreStats
from gossipgrad.second_order._tiers import Tiers as Tiers
