"""The optimizers of a run, and their schedulers."""

from collections.abc import Sequence

from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import gossipgrad as gg

from ._config import TrainConfig
from ._job import Job
from ._models import heads
from ._optimizer_options import SECOND_ORDER


def make_optimizers(
    config: TrainConfig, model: nn.Module, job: Job | None = None
) -> list[Optimizer]:
    """The optimizers that together train all parameters of `model`.

    Those of the job, or of the strategy, if it has any. Else one for `sgd`, `adamw` and
    `gossip-adamw`. For `muon` two: Muon for the parameters that `muon_parameters` names, AdamW for
    the others; Muon's rate is adjusted to the size of AdamW's updates, so that one learning rate
    and one weight decay serve both. `soap`, `kl-shampoo` and `shampoo` leave what is no matrix to
    an AdamW of their own.

    References:
        Jordan et al., Muon, 2024, for which parameters; Liu et al., Muon is scalable for LLM
        training, arXiv:2502.16982, section 2.2, for the adjusted rate.
    """
    if job is not None and (made := job.make_optimizers()) is not None:
        return made
    lr = config.learning_rate.peak
    own = config.traits.make_optimizers(
        model, config.strategy_options, lr=lr, weight_decay=config.weight_decay
    )
    if own is not None:
        return own
    parameters = list(model.parameters())
    if config.optimizer == "sgd":
        return [SGD(parameters, lr=lr, momentum=config.momentum, weight_decay=config.weight_decay)]
    if config.optimizer == "adamw":
        return [AdamW(parameters, lr=lr, weight_decay=config.weight_decay)]
    if config.optimizer == "gossip-adamw":
        return [gg.GossipAdamW(parameters, lr=lr, weight_decay=config.weight_decay)]
    if config.optimizer in SECOND_ORDER:
        return [_second_order(config, model)]
    hidden = muon_parameters(model)
    if not hidden:
        raise ValueError(
            "optimizer is muon, but the model has no matrices of hidden linear "
            "layers for it: torch's Muon takes no convolutions, and embeddings and heads go to "
            "AdamW; use optimizer adamw."
        )
    chosen = set(map(id, hidden))
    others = [parameter for parameter in parameters if id(parameter) not in chosen]
    return [
        Muon(hidden, lr=lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"),
        AdamW(others, lr=lr, weight_decay=config.weight_decay),
    ]


def _second_order(config: TrainConfig, model: nn.Module) -> Optimizer:
    options = config.options["second_order"]
    kinds = {"soap": gg.SOAP, "kl-shampoo": gg.KLShampoo, "shampoo": gg.Shampoo}
    return kinds[config.optimizer](
        model,
        lr=config.learning_rate.peak,
        weight_decay=config.weight_decay,
        max_dim=options.max_dim,
        refresh=gg.Refresh(options.refresh_every, options.refresh_delay),
    )


def muon_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Weights of the hidden linear layers: all but those of heads, which the model names."""
    left_out = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for head in heads(model):
        left_out |= {id(parameter) for parameter in head.parameters()}
    return [
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Linear)
        and isinstance(module.weight, nn.Parameter)
        and id(module.weight) not in left_out
    ]


def muon_share(optimizers: Sequence[Optimizer]) -> tuple[int, int]:
    """How many numbers Muon trains, and how many all of the optimizers together."""
    sizes = [
        (isinstance(optimizer, Muon) or group.get("role") == "muon", parameter.numel())
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    return sum(size for is_muon, size in sizes if is_muon), sum(size for _, size in sizes)


def notes_on_muon(optimizers: Sequence[Optimizer]) -> list[str]:
    """What the user should know of who trains what."""
    trained, total = muon_share(optimizers)
    if not trained:
        return []
    return [f"Muon trains {trained:,} of {total:,} parameters, and AdamW the others"]


def make_schedulers(
    config: TrainConfig, optimizers: Sequence[Optimizer], *, steps_per_epoch: int
) -> list[LRScheduler]:
    """One scheduler an optimizer; each sets the learning rate step by step."""
    rate = config.learning_rate
    lengths = {"epochs": config.epochs, "max_steps": config.max_steps}

    def factor(step: int) -> float:
        return rate.factor(step, steps_per_epoch=steps_per_epoch, **lengths)

    return [LambdaLR(optimizer, factor) for optimizer in optimizers]


def set_step(schedulers: Sequence[LRScheduler], step: int) -> None:
    """Set the rates of a step, counted from 0, as if the schedulers had made all before it."""
    for scheduler in schedulers:
        assert isinstance(scheduler, LambdaLR)
        scheduler.last_epoch = step
        for group, base, factor in zip(
            scheduler.optimizer.param_groups,
            scheduler.base_lrs,
            scheduler.lr_lambdas,
            strict=True,
        ):
            group["lr"] = base * factor(step)
