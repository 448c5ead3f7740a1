"""Small models to train out of the box."""

from ._build import NAMES as NAMES
from ._build import Inputs as Inputs
from ._build import build as build
from ._gpt import GPT as GPT
from ._images import MLP as MLP
from ._images import CIFARNet as CIFARNet
from ._images import LeNet as LeNet
from ._images import ResNet20 as ResNet20
from ._training import cross_entropy as cross_entropy
from ._training import heads as heads
from ._training import training_loss as training_loss
