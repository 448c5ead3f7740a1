"""Torchvision's models, also next to a build of torch for the CPU."""

from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

__all__ = ["googlenet", "import_torchvision", "resnet50", "vision_loss"]

_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_LIBRARIES: list[torch.library.Library] = []


def import_torchvision() -> ModuleType:
    """Torchvision, which does not import next to torch for the CPU as PyPI has the two.

    Its compiled operators are for another build of torch then, do not load, and the import fails
    because `torchvision::nms` and `qnms` are not there. They are declared here without a kernel: no
    model or transform in this repository calls them.

    Raises:
        ModuleNotFoundError: It is not installed.
    """
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(name + _BOXES)
        _LIBRARIES.append(library)  # what is declared goes with it
        import torchvision
    return torchvision


def resnet50(num_classes: int) -> nn.Module:
    """25.6 million parameters for a thousand classes."""
    import_torchvision()
    from torchvision import models

    return models.resnet50(num_classes=num_classes)


def googlenet(num_classes: int) -> nn.Module:
    """13.0 million parameters for a thousand classes, auxiliary heads included."""
    import_torchvision()
    from torchvision import models

    model = models.googlenet(num_classes=num_classes, aux_logits=True, init_weights=False)
    return _AuxiliaryLast(model)


class _AuxiliaryLast(nn.Module):
    """A GoogLeNet whose auxiliary heads run behind the last layer, so that backward begins there.

    Torchvision runs them half way, and their gradients come late. What was published of this
    network here (`profiles/googlenet.json` and what was measured with it) has them first.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.heads = nn.ModuleList([model.aux1, model.aux2])
        model.aux1 = model.aux2 = nn.Identity()
        self.body = model

    def forward(self, x: Tensor) -> tuple[Tensor, ...] | Tensor:
        outputs = self.body(x)
        if isinstance(outputs, Tensor):
            return outputs
        logits, second, first = outputs
        return logits, *(head(x) for head, x in zip(self.heads, (first, second), strict=True))


def vision_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross entropy; auxiliary heads count with a weight of 0.3 each."""
    outputs = model(x)
    if isinstance(outputs, Tensor):
        return cross_entropy(outputs, y)
    logits, *auxiliary = outputs
    return cross_entropy(logits, y) + 0.3 * sum(cross_entropy(one, y) for one in auxiliary)
