"""Plans from pure arithmetic: what a step of a model costs."""

from gossipgrad.planning._cost import AffineCost as AffineCost
from gossipgrad.planning._cost import PiecewiseCost as PiecewiseCost
