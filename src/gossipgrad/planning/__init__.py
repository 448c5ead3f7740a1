"""Plans from pure arithmetic: what a step of a model and the moving of bytes cost."""

from gossipgrad.planning._cost import AffineCost as AffineCost
from gossipgrad.planning._cost import PiecewiseCost as PiecewiseCost
from gossipgrad.planning._profile import PROFILES as PROFILES
from gossipgrad.planning._profile import Profile as Profile
