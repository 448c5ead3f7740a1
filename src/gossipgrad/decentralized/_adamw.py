"""AdamW for gossip, with a second moment of the mixed momentum."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossipgrad.optim import parameters_to_update

__all__ = ["GossipAdamW"]


class GossipAdamW(Optimizer):
    """AdamW for gossip: computes the second moment from the momentum, which partners mix.

    Plain Adam under gossip divides by the second moment of gradients of a rank's own batch, whose
    noise is p times that of the batch of all p ranks: its steps are up to `sqrt(p)` smaller than
    those of all-reduce at the same learning rate, however well replicas are mixed. This optimizer
    computes the second moment from the momentum after it was mixed. Use it as

        optimizer = gg.GossipAdamW(model.parameters(), lr=1e-3)
        session = gg.gossip(model, optimizer, mode="sync", payload="weights+momentum")

    A learning rate that suits AdamW with all-reduce suits it about as well. It sends twice the
    bytes of `payload="weights"`; the second moment is not sent. It also works without a session. A
    partner that is late or dead leaves this rank's momentum unmixed in that round; its larger noise
    then makes steps smaller.

    In step t, with the mixed momentum m of step t - 1:

        v = beta2 v + (1 - beta2) c(t-1) m^2        (from t = 2)
        m = beta1 m + (1 - beta1) g
        u = (beta2 v + (1 - beta2) c(t) m^2) / (1 - beta2^t)
        w = w - lr (weight_decay w + m / (1 - beta1^t) / (sqrt(u) + eps))
        c(t) = (1 + beta1) / ((1 - beta1) (1 - beta1^(2 t)))

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        betas: Decay of momentum and of its square.
        eps: Added to the root.
        weight_decay: Decoupled, as in AdamW.

    Attributes:
        nonfinite_steps: Number of steps that left out a parameter, because its gradient was not
            finite; the first one warns.

    Raises:
        ValueError: For a negative `lr`, `eps` or `weight_decay`, or betas not in [0, 1).

    References:
        Wang et al., AdaMomentum, arXiv:2106.11514: squares of the momentum instead of the gradient.
        Deviations: (1) the momentum that was mixed after a step enters v in the next step, and the
        current momentum enters only u, so that nothing is exchanged within a step; this share
        avoids a division by 0 for a coordinate that is new to this rank. (2) Of noise that is
        independent from step
        to step, the square of m has 1 / c(t) of what the square of g has; c compensates for it, so
        that `lr` has the same effect as in AdamW if gradients are mostly noise. If they hardly
        change, steps are up to `sqrt(c)` smaller, 4.4 for `beta1=0.9`. (3) eps is added to the root
        only.

    Example:
        >>> import torch, gossipgrad as gg
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = gg.GossipAdamW(model.parameters(), lr=0.01)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
    """

    nonfinite_steps: int = 0

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            if not value >= 0:
                raise ValueError(f"{name} must be at least 0, got {value!r}")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers from 0 to below 1, got {betas!r}")
        of = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, of)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Perform one step; parameters whose gradient is not finite stay as they are.

        Args:
            closure: Evaluates the model again and returns the loss.

        Raises:
            RuntimeError: For sparse or complex gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and (
                    parameter.grad.is_sparse or parameter.is_complex()
                ):
                    raise RuntimeError("GossipAdamW supports only dense and real gradients")
        held = parameters_to_update(self)
        for group, to_update in zip(self.param_groups, held, strict=True):
            alike: dict[Any, list[Tensor]] = defaultdict(list)
            for parameter in to_update:
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0, device="cpu")
                    state["exp_avg"] = torch.zeros_like(parameter)
                    # In bf16, `beta2 * square` rounds back to `square`, which could not fall.
                    wide = torch.promote_types(parameter.dtype, torch.float32)
                    state["momentum_sq"] = torch.zeros_like(parameter, dtype=wide)
                state["step"] += 1
                kind = int(state["step"]), parameter.device, parameter.dtype
                alike[kind].append(parameter)
            for (step, _, _), parameters in alike.items():
                self._update(group, step, parameters)
        return loss

    def _update(self, group: dict[str, Any], step: int, parameters: list[Tensor]) -> None:
        """Update the parameters of one group with the same step count."""
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        gradients = [p.grad for p in parameters if p.grad is not None]
        momenta = [self.state[p]["exp_avg"] for p in parameters]
        squares = [self.state[p]["momentum_sq"] for p in parameters]

        def share(t: int) -> float:
            return (1 - beta2) * (1 + beta1) / (1 - beta1) / (1 - beta1 ** (2 * t))

        if step > 1:
            before = [m.to(square.dtype) for m, square in zip(momenta, squares, strict=True)]
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, before, before, share(step - 1))
        torch._foreach_lerp_(momenta, gradients, 1 - beta1)
        correction = 1 - beta2**step
        roots = torch._foreach_mul(squares, beta2 / correction)
        now = [m.to(square.dtype) for m, square in zip(momenta, squares, strict=True)]
        torch._foreach_addcmul_(roots, now, now, share(step) / correction)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        torch._foreach_addcdiv_(parameters, momenta, roots, -lr / (1 - beta1**step))
