"""Small models to train out of the box."""

from ._build import NAMES as NAMES
from ._build import build as build
from ._lenet import LeNet as LeNet
from ._mlp import MLP as MLP
