"""Second-order optimizers whose roots are computed beside training."""

from gossipgrad.second_order._kl_shampoo import KLShampoo as KLShampoo
from gossipgrad.second_order._optimizer import SecondOrder as SecondOrder
from gossipgrad.second_order._refresh import Refresh as Refresh
from gossipgrad.second_order._refresh import RefreshStats as RefreshStats
from gossipgrad.second_order._roots import inverse_root as inverse_root
from gossipgrad.second_order._roots import newton_db_inverse_root as newton_db_inverse_root
from gossipgrad.second_order._roots import newton_inverse_root as newton_inverse_root
from gossipgrad.second_order._roots import power_step as power_step
from gossipgrad.second_order._shampoo import Shampoo as Shampoo
from gossipgrad.second_order._sharding import Sharding as Sharding
from gossipgrad.second_order._sharing import RootSharing as RootSharing
from gossipgrad.second_order._sharing import ShareStats as ShareStats
from gossipgrad.second_order._sharing import share_roots as share_roots
from gossipgrad.second_order._soap import SOAP as SOAP
from gossipgrad.second_order._tiers import Tiers as Tiers
