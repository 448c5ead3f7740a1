"""Merged gradient sparsification: send the largest elements, keep the rest."""

from gossipgrad.sparsification._density import Density as Density
from gossipgrad.sparsification._density import Warmup as Warmup
from gossipgrad.sparsification._session import SparseSession as SparseSession
from gossipgrad.sparsification._sparsify import sparsify as sparsify
from gossipgrad.sparsification._stats import GroupStats as GroupStats
from gossipgrad.sparsification._stats import SparseStats as SparseStats
