"""Small models to train out of the box."""

from ._build import NAMES as NAMES
from ._build import build as build
from ._cifarnet import CIFARNet as CIFARNet
from ._googlenet import GoogLeNet as GoogLeNet
from ._gpt import GPT as GPT
from ._heads import heads as heads
from ._lenet import LeNet as LeNet
from ._loss import AuxiliaryLogits as AuxiliaryLogits
from ._loss import cross_entropy as cross_entropy
from ._loss import training_loss as training_loss
from ._mlp import MLP as MLP
from ._resnet20 import ResNet20 as ResNet20
from ._resnet50 import ResNet50 as ResNet50
