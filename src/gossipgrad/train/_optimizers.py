"""The optimizers of a run, and their schedulers."""

from collections.abc import Sequence

from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from ._config import TrainConfig
from ._learning_rate import LearningRate


def make_optimizers(config: TrainConfig, model: nn.Module, num_classes: int) -> list[Optimizer]:
    """The optimizers that together train all parameters of `model`.

    One for `sgd` and `adamw`. For `muon` two: Muon for the parameters that `muon_parameters` names,
    AdamW for the others; Muon's rate is adjusted to the size of AdamW's updates, so that one
    learning rate and one weight decay serve both.

    Args:
        config: The options, resolved.
        model: What they train.
        num_classes: How many the model tells apart.

    Raises:
        ValueError: `optimizer` is muon, and nothing in the model is for it.

    References:
        Jordan et al., Muon, 2024, for which parameters; Liu et al., Muon is scalable for LLM
        training, arXiv:2502.16982, section 2.2, for the adjusted rate.
    """
    lr = config.learning_rate.peak
    parameters = list(model.parameters())
    if config.optimizer == "sgd":
        return [SGD(parameters, lr=lr, momentum=config.momentum, weight_decay=config.weight_decay)]
    if config.optimizer == "adamw":
        return [AdamW(parameters, lr=lr, weight_decay=config.weight_decay)]
    hidden = muon_parameters(model, num_classes)
    if not hidden:
        raise ValueError(
            f"optimizer is muon, but model {config.model!r} has no matrices of hidden layers for "
            "it: convolutions, embeddings and heads go to AdamW; use optimizer adamw."
        )
    chosen = set(map(id, hidden))
    others = [parameter for parameter in parameters if id(parameter) not in chosen]
    return [
        Muon(hidden, lr=lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"),
        AdamW(others, lr=lr, weight_decay=config.weight_decay),
    ]


def muon_parameters(model: nn.Module, num_classes: int) -> list[nn.Parameter]:
    """Weights of the hidden linear layers: all but those with one output a class (heads).

    Convolutions are no matrices, and torch's Muon takes none; embeddings are none of linear layers,
    also where a head shares their weights.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        >>> [tuple(parameter.shape) for parameter in muon_parameters(model, 10)]
        [(32, 64)]
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return [
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Linear)
        and isinstance(module.weight, nn.Parameter)
        and module.out_features != num_classes
        and id(module.weight) not in embeddings
    ]


def make_schedulers(
    rate: LearningRate, optimizers: Sequence[Optimizer], *, steps_per_epoch: int, epochs: int
) -> list[LRScheduler]:
    """One scheduler an optimizer; each sets the learning rate step by step."""

    def factor(step: int) -> float:
        return rate.factor(step, steps_per_epoch=steps_per_epoch, epochs=epochs)

    return [LambdaLR(optimizer, factor) for optimizer in optimizers]
