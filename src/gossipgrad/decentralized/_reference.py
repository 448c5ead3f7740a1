r"""GossipGraD beside the paper: p replicas in one process, in the paper's letters.

No `torch.distributed`, no buckets, no hooks, no threads: a message is a dictionary, the network is
another dictionary, and every rank is served in turn. It says what the session must compute; it is
not for training.

Letters
    p            world size; r, s: ranks; t: number of the round, counted from 0
    w_r, g_r     parameters and gradient of replica r; dw_r: its optimizer's update
    q(.)         the message: a copy, cast to the wire dtype if one is given
    x_r, y_r     what r sent in this round, and what it received: y_r = x_s
    a            the weight of the difference; 1/2 unless the schedule says otherwise
    e_r          the rounding error of the parameters' own dtype, in fp32
    C_r          the correction of the weights of replica r, at first 0; k, c: its momentum and gain

Rules. The comments in the code name the rule that a line implements.
    R1  Partners. In round t rank r sends to one rank and receives from one rank, both given by
        the schedule: O(1) messages a step, all ranks heard from after about log2 p rounds, other
        partners after that. (Abstract, items 1 to 3; authors' code, `next()`: dissemination or
        hypercube, then the next shuffled communicator.)
    R2  Rounds. A round is `every` steps; t counts the rounds that are closed. (Every batch in
        the abstract and in the authors' code.)
    R3  sync. After the update: x_r = q(w_r), then w_r <- w_r + a (y_r - x_r).
        (Adapt-then-combine decentralized SGD.)
    R4  overlap. x_r = q(w_r) leaves before the round's update; after it w_r <- w_r + a (y_r - x_r)
        with the x_r of then: the whole round hides the message and the mean over ranks is that of
        plain SGD. (Abstract, item 5; D-PSGD, Algorithm 1, with one partner.)
    R5  lagged. Sent as in R4, but after the update w_r <- w_r + a (y_r - w_r): the mean moves by
        (1 - a) mean(dw), half a step. (Authors' code, MPIGossipParamsGPU9.)
    R6  Low-precision parameters: t = w + e in fp32, t <- t + a (...), w <- t rounded, e <- t - w.
        The sum over ranks of w + e is kept.
    R7  Payload "weights+state": optimizer state of the parameter's shape follows the same rule
        in rounds with t mod `state_every` = 0; what cannot be negative is clamped at 0; `step`
        counters stay. (Authors' code, MPIGossipParamsGPU2 and later: the solver's history.)
        "weights+momentum": of that state the first moments alone. (Ours.)
    R8  Payload "gradients": before the update g_r <- g_r + a (q(g_s) - q(g_r)); weights never
        meet, so replicas drift apart. (Abstract, items 2 and 5.) Payload "gradients+weights":
        R8, then R3 in the same round with the same partner. (Authors' code, the first
        MPIGossipParamsGPU with `-avgdata`.)
    R9  After steps H, 2H, ... the exact average replaces every replica. (Gossip-PGA; authors'
        code, `allreduce_iter`.)
    R10 `exchanges` n: R3 is done n times in a step, each time as a round with its own partner.
        (Ours: between one partner and all.) With `overlap` the first of these n rounds is R4, of
        the weights with which the gradient is computed, and the others are R3. (Ours: D-PSGD and
        adapt-then-combine in one step.)
    R11 sync with a momentum k > 0: after the update of every step C_r <- k C_r, w_r <- w_r + C_r;
        in each R3, C_r <- C_r + c a (y_r - x_r). An average (R9) sets C_r to 0. The sum over
        ranks of C_r stays 0. (Ours: with R7 the momentum u_r of SGD becomes u_r + a (u_s - u_r);
        C_r takes the place of what that adds, without sending u. Relatives: quasi-global momentum
        and SlowMo, which form a momentum from the differences of mixed weights.)

Deviations from the authors' code
    1. The difference of snapshots (R4) is the default; the published rule (R5) is `lagged`.
    2. What is sent is a copy. MPIGossipParamsGPU6, GPU7 and CPU9 to CPU12 send the live buffer
       while the solver writes it.
    3. The whole message is waited for. GPU9 stops waiting when either weights or history are in.
    4. Any p, not powers of two only; the partners are whatever the schedule says.
    5. The relabelling is a seeded one that every rank computes for itself, in place of p
       communicators made from one unseeded shuffle on rank 0.
    6. The periodic average divides by p; `do_allreduce` multiplies by 1/2 for every p.
    7. All parameters of one round share one partner (`-batchwise`); no partner for each layer.
    8. State that a sender does not have yet counts as zeros; a receiver without it takes nothing.
    As the authors do it: BatchNorm statistics are not exchanged.

References:
    Daily et al., GossipGraD, arXiv:1803.05880, abstract.
    The authors' Caffe: matex-org/caffe-nvidia, branch shufgrad_summit (MPIGossipParamsGPU to
    GPU9), and matex-org/caffe-intel, branch shufgrad2 (MPIGossipParamsCPU7 to CPU12).
    Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, arXiv:1705.09056.
    Chen et al., Accelerating Gossip SGD with Periodic Global Averaging, arXiv:2105.09080.
    Lin et al., Quasi-Global Momentum, arXiv:2102.04761. Wang et al., SlowMo, arXiv:1910.00643.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from gossipgrad.topology import Schedule

MODES = ("sync", "overlap", "lagged")
PAYLOADS = (
    *("weights", "weights+momentum", "weights+state"),
    *("gradients", "gradients+weights"),
)
MOMENTUM = frozenset({"momentum_buffer", "exp_avg"})
NON_NEGATIVE = frozenset(
    {
        *("exp_avg_sq", "max_exp_avg_sq", "exp_inf", "sum", "square_avg", "acc_delta"),
        *("step_size", "variance", "row_var", "col_var"),
    }
)

# The tensors of one replica, or of one message: (number of the parameter, "w", "g" or state key).
Values = dict[tuple[int, str], Tensor]


@dataclass(frozen=True)
class Exchange:
    """One rank's side of one round: the weight a, what it sent, what it received."""

    a: float
    x: Values
    y: Values


class Reference:
    """GossipGraD on p replicas in one process; the arithmetic that the session must reproduce.

    Set `.grad` on every replica, then call `step()`: it does, for all ranks together, the
    exchange of gradients, the local updates, the mixing and the periodic average.

    Args:
        models: One replica per rank, with parameters of equal shapes and dtypes. Values may differ.
        optimizers: The optimizer of each replica, over that replica's parameters.
        schedule: The partners in round t, and the weight.
        mode: "sync" (R3), "overlap" (R4) or "lagged" (R5). Gradients can be exchanged only between
            backward and update, so payloads with gradients treat the first two alike.
        payload: "weights", "weights+momentum" or "weights+state" (R7), "gradients" or
            "gradients+weights" (R8).
        every: Steps in a round (R2). Gradients are exchanged in the last step.
        state_every: Rounds from one exchange of the optimizer's state to the next (R7).
        average_every: Steps between exact averages (R9), "log_p" for `ceil(log2 p)`, or None.
        exchanges: Rounds in a step of mode "sync" (R10).
        overlap: Whether the first of these is R4; with `exchanges` of 2 or more, `every` 1.
        momentum: k of R11, for mode "sync" and payload "weights"; 0 for no corrections.
        gain: c of R11.
        wire_dtype: The dtype on the wire; None sends each tensor in its own.

    Raises:
        ValueError: For settings outside these, or replicas that do not match.

    Example:
        >>> import torch
        >>> from gossipgrad.topology import dissemination
        >>> models = [torch.nn.Linear(1, 1, bias=False) for _ in range(4)]
        >>> for rank, model in enumerate(models):
        ...     model.weight = torch.nn.Parameter(torch.full((1, 1), float(rank)))
        ...     model.weight.grad = torch.zeros(1, 1)
        >>> optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        >>> reference = Reference(models, optimizers, dissemination(4), mode="sync")
        >>> reference.step()
        >>> reference.step()
        >>> [model.weight.item() for model in models]
        [1.5, 1.5, 1.5, 1.5]
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        schedule: Schedule,
        mode: str = "overlap",
        payload: str = "weights",
        every: int = 1,
        state_every: int = 1,
        average_every: int | str | None = None,
        exchanges: int = 1,
        overlap: bool = False,
        momentum: float = 0.0,
        gain: float = 0.4,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        p = schedule.world_size
        if len(models) != p or len(optimizers) != p:
            raise ValueError(
                f"{len(models)} models and {len(optimizers)} optimizers for a schedule of "
                f"{p} ranks: give one of each to every rank."
            )
        if mode not in MODES:
            raise ValueError(f"mode={mode!r} is none of {', '.join(MODES)}.")
        if payload not in PAYLOADS:
            raise ValueError(f"payload={payload!r} is none of {', '.join(PAYLOADS)}.")
        if mode == "lagged" and payload.startswith("gradients"):
            raise ValueError(
                f"mode='lagged' mixes weights sent before the update, which payload={payload!r} "
                "does not send: use payload='weights' or mode='sync'."
            )
        if momentum and (mode != "sync" or payload != "weights"):
            raise ValueError(
                f"momentum={momentum} with mode={mode!r} and payload={payload!r}: it corrects "
                "weights in mode 'sync' with payload 'weights'."
            )
        if overlap and (exchanges < 2 or every > 1):
            raise ValueError(
                f"overlap with exchanges={exchanges} and every={every}: it needs 2 and 1."
            )
        if average_every == "log_p":
            average_every = max(1, math.ceil(math.log2(p)))
        if isinstance(average_every, str):
            raise ValueError(f"average_every={average_every!r}: give steps, 'log_p' or None.")
        for name, value in [
            ("every", every),
            ("state_every", state_every),
            ("average_every", average_every),
            ("exchanges", exchanges),
        ]:
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: it counts steps or rounds, so at least 1.")

        self.p = p
        self.w = [[w for w in model.parameters() if w.requires_grad] for model in models]
        shapes = [[(w.shape, w.dtype) for w in replica] for replica in self.w]
        for r in range(1, p):
            if shapes[r] != shapes[0]:
                raise ValueError(
                    f"replica {r} differs from replica 0 in its parameters: "
                    "build all replicas from the same model class and arguments."
                )
        self.optimizers = list(optimizers)
        self.schedule = schedule
        self.mode = mode
        self.payload = payload
        self.every = every
        self.state_every = state_every
        self.average_every = average_every
        self.exchanges = exchanges
        self.overlap = overlap
        self.momentum = momentum
        self.gain = gain
        self.wire_dtype = wire_dtype
        self.steps = 0
        self.rounds = 0  # t
        self.clamps = 0  # elements of state that mixing made negative (R7)
        self.outstanding: list[Exchange | None] = [None] * p
        self.e = [[residual(w) for w in replica] for replica in self.w]  # R6
        self.c = [[torch.zeros_like(wide(w)) for w in replica] for replica in self.w]  # R11

    @torch.no_grad()
    def step(self) -> None:
        """Make one step of every rank: exchange gradients, update, exchange weights, average."""
        opens = self.steps % self.every == 0  # R2
        closes = (self.steps + 1) % self.every == 0
        gradients = self.payload.startswith("gradients")
        early = self.mode != "sync" and not gradients

        if opens and (early or self.overlap):
            self.outstanding = self._exchange([self._values(r) for r in range(self.p)])  # R4, R5
        if closes and gradients:
            self._mix_gradients()  # R8
        self._update()  # w_r <- w_r + dw_r
        if self.momentum:
            self._correct()  # R11
        if self.overlap:
            self._settle()  # R10
            self.rounds += 1
        if closes and not early and self.payload != "gradients":
            for _ in range(self.exchanges - 1 - self.overlap):  # R10
                self.outstanding = self._exchange([self._values(r) for r in range(self.p)])
                self._settle()
                self.rounds += 1
            self.outstanding = self._exchange([self._values(r) for r in range(self.p)])  # R3
        if closes:
            self._settle()
            self.rounds += 1
        self.steps += 1
        if self.average_every is not None and self.steps % self.average_every == 0:
            self.average_()  # R9

    @torch.no_grad()
    def average_(self) -> None:
        """Apply what is outstanding, then make every replica the exact average (R9).

        Inside a round this ends the round's exchange early; the round still closes on its step,
        with nothing left to mix.
        """
        self._settle()
        for i, mean in enumerate(self.consensus()):
            for r in range(self.p):
                replace(self.w[r][i], mean, self.e[r][i])
                self.c[r][i].zero_()  # R11
        if self.payload in ("weights+momentum", "weights+state"):
            state = [self._state(r) for r in range(self.p)]
            for key in {key for values in state for key in values}:
                have = [values[key] for values in state if key in values]
                mean = sum((v.double() for v in have), torch.zeros(())) / self.p  # deviation 8
                for v in have:
                    v.copy_(mean)

    @torch.no_grad()
    def invariant(self) -> list[Float64[Tensor, "..."]]:
        """Return the invariant: the sum over ranks of w + e and outstanding differences.

        Returns:
            One fp64 tensor per parameter, of its shape.
        """
        total = [torch.zeros_like(w, dtype=torch.float64) for w in self.w[0]]
        for r in range(self.p):
            exchange = self.outstanding[r]
            for i, w in enumerate(self.w[r]):
                total[i] += w.double()
                if (e := self.e[r][i]) is not None:
                    total[i] += e.double()
                if exchange is not None:
                    self._count_in(total[i], exchange, i, w)
        return total

    def consensus(self) -> list[Float64[Tensor, "..."]]:
        """Return the mean over ranks of w + e and of outstanding differences, in fp64."""
        return [total / self.p for total in self.invariant()]

    @torch.no_grad()
    def consensus_distance(self) -> float:
        """sqrt(mean over r of |w_r - mean(w)|^2), over all parameters, in fp64."""
        w = torch.stack(
            [torch.cat([v.double().flatten() for v in self.w[r]]) for r in range(self.p)]
        )
        return math.sqrt((w - w.mean(0)).square().sum().item() / self.p)

    def _update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def _correct(self) -> None:
        """R11: C_r <- k C_r, w_r <- w_r + C_r."""
        for r in range(self.p):
            for w, c, e in zip(self.w[r], self.c[r], self.e[r], strict=True):
                add(w, c.mul_(self.momentum), 1.0, e)

    def _values(self, r: int) -> Values:
        """Return the live tensors that rank r mixes in round t."""
        values: Values = {(i, "w"): w for i, w in enumerate(self.w[r])}
        travels = self.payload in ("weights+momentum", "weights+state")
        if travels and self.rounds % self.state_every == 0:  # R7
            values |= self._state(r)
        return values

    def _state(self, r: int) -> Values:
        """Return the state to exchange: floating point, of the parameter's shape, no `step`."""
        return {
            (i, key): v
            for i, w in enumerate(self.w[r])
            for key, v in self.optimizers[r].state.get(w, {}).items()
            if key != "step"
            and (self.payload == "weights+state" or key in MOMENTUM)
            and isinstance(v, Tensor)
            and v.is_floating_point()
            and v.shape == w.shape
        }

    def _exchange(self, values: list[Values]) -> list[Exchange | None]:
        """Round t on the wire: every rank sends a copy to one rank, receives from one rank."""
        t = self.rounds
        x = [{key: self._q(v) for key, v in values[r].items()} for r in range(self.p)]
        peers = [self.schedule.peers(t, r) for r in range(self.p)]  # R1
        mail = {(r, peers[r].send_to): x[r] for r in range(self.p)}
        exchanges: list[Exchange | None] = []
        for r in range(self.p):
            s = peers[r].recv_from
            if s is None:
                exchanges.append(None)
            else:
                a = self.schedule.weight(t, r, default=0.5)
                exchanges.append(Exchange(a=a, x=x[r], y=mail[s, r]))
        return exchanges

    def _q(self, v: Tensor) -> Tensor:
        return v.to(self.wire_dtype or v.dtype, copy=True)

    def _difference(self, exchange: Exchange, key: tuple[int, str], v: Tensor) -> Tensor:
        """Return y - x, or y - w (R5), in fp32 or wider; missing: zeros (deviation 8)."""
        zeros = torch.zeros_like(v)
        y = exchange.y.get(key, zeros)
        x = v if self.mode == "lagged" else exchange.x.get(key, zeros)
        dtype = wide(v).dtype
        return y.to(dtype) - x.to(dtype)

    def _count_in(self, total: Tensor, exchange: Exchange, i: int, w: Tensor) -> None:
        """Add an exchange's outstanding difference of w, parameter i, to a sum."""
        total += exchange.a * self._difference(exchange, (i, "w"), w).double()

    def _settle(self) -> None:
        """Apply outstanding differences, v_r <- v_r + a (y_r - x_r), to all tensors."""
        for r, exchange in enumerate(self.outstanding):
            if exchange is None:
                continue
            for (i, key), v in self._values(r).items():
                e = self.e[r][i] if key == "w" else None
                difference = self._difference(exchange, (i, key), v)
                add(v, difference, exchange.a, e)  # R3, R4, R5
                if self.momentum:
                    self.c[r][i].add_(difference, alpha=self.gain * exchange.a)  # R11
                if key in NON_NEGATIVE:  # R7
                    self.clamps += int((v < 0).sum())
                    v.clamp_(min=0)
        self.outstanding = [None] * self.p

    def _mix_gradients(self) -> None:
        """R8: g_r <- g_r + a (q(g_s) - q(g_r))."""
        g: list[Values] = [
            {(i, "g"): w.grad for i, w in enumerate(self.w[r]) if w.grad is not None}
            for r in range(self.p)
        ]
        for r, exchange in enumerate(self._exchange(g)):
            if exchange is not None:
                for key, v in g[r].items():
                    add(v, self._difference(exchange, key, v), exchange.a, None)


def wide(v: Tensor) -> Tensor:
    """Return v in fp32 or wider."""
    return v.to(torch.promote_types(v.dtype, torch.float32))


def residual(w: Tensor) -> Float[Tensor, "..."] | None:
    """Return fp32 zeros for a parameter narrower than that, else None (R6)."""
    return torch.zeros_like(w, dtype=torch.float32) if w.dtype.itemsize < 4 else None


def add(v: Tensor, difference: Tensor, a: float, e: Tensor | None) -> None:
    """Compute v <- v + a difference, at least in fp32; e gets the rounding error (R6)."""
    if v.dtype.itemsize >= 4:
        v.add_(difference, alpha=a)
        return
    t = v.float() if e is None else v.float() + e
    t.add_(difference, alpha=a)
    replace(v, t, e)


def replace(v: Tensor, t: Tensor, e: Tensor | None) -> None:
    """Set v <- t in v's dtype, e <- the rounding error (R6)."""
    v.copy_(t)
    if e is not None:
        e.copy_(t - v.float())
