"""Plans from pure arithmetic: the cost of a step and its messages, and merges of gradients."""

from gossipgrad.planning._cost import AffineCost as AffineCost
from gossipgrad.planning._cost import PiecewiseCost as PiecewiseCost
from gossipgrad.planning._method import Method as Method
from gossipgrad.planning._method import dense_all_reduce as dense_all_reduce
from gossipgrad.planning._method import sparse_all_gather as sparse_all_gather
from gossipgrad.planning._optimal import plan as plan
from gossipgrad.planning._plan import LEAST_SAVING as LEAST_SAVING
from gossipgrad.planning._plan import Merge as Merge
from gossipgrad.planning._plan import Plan as Plan
from gossipgrad.planning._plan import Span as Span
from gossipgrad.planning._profile import PROFILES as PROFILES
from gossipgrad.planning._profile import Profile as Profile
from gossipgrad.planning._rules import mg_wfbp as mg_wfbp
from gossipgrad.planning._rules import omgs_greedy as omgs_greedy
from gossipgrad.planning._rules import single as single
from gossipgrad.planning._rules import threshold as threshold
from gossipgrad.planning._rules import wfbp as wfbp
