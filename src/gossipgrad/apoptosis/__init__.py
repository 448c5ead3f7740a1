"""Neuron apoptosis: merge redundant neurons into others during training."""

from gossipgrad.apoptosis._find import Found as Found
from gossipgrad.apoptosis._find import find as find
from gossipgrad.apoptosis._merges import Consumer as Consumer
from gossipgrad.apoptosis._merges import errors_of as errors_of
from gossipgrad.apoptosis._merges import folds_of as folds_of
from gossipgrad.apoptosis._merges import joint_error as joint_error
from gossipgrad.apoptosis._merges import removal_order as removal_order
from gossipgrad.apoptosis._merges import split as split
from gossipgrad.apoptosis._moments import Moments as Moments
from gossipgrad.apoptosis._neurons import Entries as Entries
from gossipgrad.apoptosis._neurons import Neurons as Neurons
from gossipgrad.apoptosis._plan import Merging as Merging
from gossipgrad.apoptosis._plan import ShrinkPlan as ShrinkPlan
from gossipgrad.apoptosis._rebuild import rebuild as rebuild
from gossipgrad.apoptosis._session import ShrinkEvent as ShrinkEvent
from gossipgrad.apoptosis._session import ShrinkSession as ShrinkSession
from gossipgrad.apoptosis._session import ShrinkSettings as ShrinkSettings
from gossipgrad.apoptosis._session import ShrinkStats as ShrinkStats
from gossipgrad.apoptosis._shrink import shrink as shrink
from gossipgrad.apoptosis._surgery import Resize as Resize
from gossipgrad.apoptosis._surgery import Shift as Shift
from gossipgrad.apoptosis._surgery import Surgery as Surgery
from gossipgrad.apoptosis._surgery import operate as operate
from gossipgrad.apoptosis._trial import Certificate as Certificate
from gossipgrad.apoptosis._trial import merged as merged
from gossipgrad.apoptosis._trial import samples_at_risk as samples_at_risk
