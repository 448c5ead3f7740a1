"""Second-order optimizers with roots computed in the background and state in tiers."""

from gossipgrad.second_order._coherence import RootSharing as RootSharing
from gossipgrad.second_order._coherence import ShareStats as ShareStats
from gossipgrad.second_order._coherence import share_roots as share_roots
from gossipgrad.second_order._kl_shampoo import KLShampoo as KLShampoo
from gossipgrad.second_order._optimizer import SecondOrder as SecondOrder
from gossipgrad.second_order._refresh import Background as Background
from gossipgrad.second_order._refresh import Deterministic as Deterministic
from gossipgrad.second_order._refresh import Refresher as Refresher
from gossipgrad.second_order._refresh import RefreshStats as RefreshStats
from gossipgrad.second_order._refresh import Root as Root
from gossipgrad.second_order._refresh import Staggered as Staggered
from gossipgrad.second_order._refresh import Synchronous as Synchronous
from gossipgrad.second_order._roots import eigenbasis as eigenbasis
from gossipgrad.second_order._roots import inverse_root as inverse_root
from gossipgrad.second_order._roots import newton_inverse_root as newton_inverse_root
from gossipgrad.second_order._roots import power_step as power_step
from gossipgrad.second_order._shampoo import Shampoo as Shampoo
from gossipgrad.second_order._soap import SOAP as SOAP
from gossipgrad.second_order._tiers import Store as Store
from gossipgrad.second_order._tiers import StoreStats as StoreStats
from gossipgrad.second_order._tiers import Tiers as Tiers
