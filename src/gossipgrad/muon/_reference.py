r"""SUDA-Muon beside the paper: N agents in one process, in the manuscript's letters.

No `torch.distributed`, no buckets, no hooks: every variable is one stacked tensor of shape
`(N, m, n)`, and a matrix of weights acts on its first axis. It says what the session must compute;
it is not for training.

Letters
    N            agents; k: the iteration, from 0
    X, G         parameters and stochastic gradients of all agents
    M            exponential average of gradients; b: its weight ("beta")
    H            trackers of the mean of M
    a            step size ("alpha"); msgn(H) = U V^T of the reduced SVD, msgn(0) = 0
    Y            duals; S = B Y
    W            weights: symmetric, doubly stochastic, primitive
    A, B, C      of the template: A, C and B^2 are polynomials of W; B Z = 0 iff Z is a consensus

Rules. The comments in the code name the line that they implement.
    A1  Input and start: X^0 equal on all agents, Y^0 = 0, M^0 = H^0 = G^0.
    A2  M^{k+1} = b M^k + (1 - b) G^k.
    A3  H^{k+1} = W (H^k + M^{k+1} - M^k).
    A4  X^{k+1} = A (C X^k - a msgn(H^{k+1})) - B Y^k.
    A5  Y^{k+1} = Y^k + B X^{k+1}.
    (Algorithm 1.) `Stacked` is A4 and A5 with the dense square root B of B^2.
    N   Two lines of A4 and A5 subtracted leave neighbour communication alone, with U = a msgn(H):
        X^{k+2} = (I - B^2 + A C) X^{k+1} - A C X^k - A (U^{k+2} - U^{k+1}). `Neighbours` is that,
        each backbone in the form that it is published in:
        ed           psi' = X - U; X' = W (psi' + X - psi)
        extra        X' = W (2 X - X_prev) - (U - U_prev)
        atc-gt       Z' = W (Z + U - U_prev); X' = W (X - Z')
        semi-atc-gt  Z' = W (Z + U - U_prev); X' = W X - Z'
        non-atc-gt   Z' = W Z + U - U_prev; X' = W X - Z'
        paper-ed     X' = W (W (2 X - X_prev) - (U - U_prev))
        paper-extra  X' = V (X + V (X - X_prev) - (U - U_prev)) with V = (I + W) / 2
        demuon       X' = W (X - U)

Deviations
    1. The manuscript's ED, EXTRA and GT are not those of the papers that it cites: its ED has
       B^2 = I - W^2 and C = W where exact diffusion has I - W and I, its EXTRA is a lazy hybrid,
       its ATC-GT is semi-ATC-GT. Here `ed`, `extra` and the three `-gt` are those of Alghunaim and
       Yuan; `paper-ed` and `paper-extra` are the manuscript's.
    2. `demuon` has B = 0, which the template rules out: gossip of X after the update.
    3. U is a_k msgn(H), with the step size in it, so that schedules of a are exact in N.
    4. W may be another in every iteration, the same for H and X of one. No theory covers that;
       `atc-gt`, `semi-atc-gt`, `non-atc-gt`, `paper-extra` and `demuon` were seen to converge.
    5. Steps for parameters that are no matrices, weight decay, Nesterov momentum and scales by
       shape are not in the manuscript: the session takes for U whatever the optimizer has done.

    6. Differences of iterates, as N has them, add up the rounding of X: the session keeps instead
       S^k and H^k - M^k as sums of what the exchanges have added, with the same iterates.
    7. The session has `ed`, `extra`, the three `-gt` and `demuon`; `paper-ed`, `paper-extra` and
       any other A, B^2 and C (`Stacked`) are here alone.

References:
    SUDA-Muon, arXiv:2604.23980, and its unpolished manuscript, Algorithm 1, section 3.2,
    Proposition 4.5, Proposition 5.1.
    Alghunaim, Yuan, A Unified and Refined Convergence Analysis for Non-Convex Decentralized
    Learning, arXiv:2110.09993, section 2.
    DeMuon, arXiv:2510.01377.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

Agents = Float[Tensor, "N m n"]
Weights = Float[Tensor, "N N"]

NAMES = (
    *("ed", "extra", "atc-gt", "semi-atc-gt", "non-atc-gt"),
    *("paper-ed", "paper-extra", "demuon"),
)


def mix(W: Weights, X: Agents) -> Agents:
    """One exchange with neighbours: X' = W X."""
    return torch.einsum("ij,jmn->imn", W, X)


def msgn(H: Agents) -> Agents:
    """U V^T of the reduced SVD of each agent's H; zeros for zero."""
    U, S, Vh = torch.linalg.svd(H, full_matrices=False)
    kept = S.amax(-1, keepdim=True) * 1e-12 < S
    return (U * kept.unsqueeze(-2).to(H.dtype)) @ Vh


def template(name: str, W: Weights) -> tuple[Weights, Weights, Weights]:
    """A, B^2 and C of a backbone; deviations 1 and 2."""
    I = torch.eye(len(W), dtype=W.dtype)  # noqa: E741
    V = (I + W) / 2
    return {
        "ed": (W, I - W, I),
        "extra": (I, I - W, W),
        "atc-gt": (W @ W, (I - W) @ (I - W), I),
        "semi-atc-gt": (W, (I - W) @ (I - W), W),
        "non-atc-gt": (I, (I - W) @ (I - W), W @ W),
        "paper-ed": (W, I - W @ W, W),
        "paper-extra": (V, I - V, V),
        "demuon": (W, torch.zeros_like(W), I),
    }[name]


class Stacked:
    """A4 and A5 as they are written, with the dense square root of B^2.

    Args:
        name: Of the backbone; or the three matrices A, B^2 and C themselves.
        W: The weights.
        X: At the start, equal on all agents.
    """

    def __init__(self, name: str | tuple[Weights, Weights, Weights], W: Weights, X: Agents) -> None:
        self.A, B2, self.C = template(name, W) if isinstance(name, str) else name
        squares, vectors = torch.linalg.eigh(B2)
        self.B = (vectors * squares.clamp_min(0).sqrt()) @ vectors.T
        self.X, self.Y = X.clone(), torch.zeros_like(X)  # A1

    def step(self, U: Agents) -> Agents:
        """X of the next iteration."""
        self.X = mix(self.A, mix(self.C, self.X) - U) - mix(self.B, self.Y)  # A4
        self.Y = self.Y + mix(self.B, self.X)  # A5
        return self.X


class Neighbours:
    """N: the same by neighbour communication alone; each `mix` is one exchange.

    Args:
        name: Of the backbone.
        X: At the start, equal on all agents.
    """

    def __init__(self, name: str, X: Agents) -> None:
        if name not in NAMES:
            raise ValueError(f"backbone {name!r} is none of {', '.join(NAMES)}")
        self.name, self.X = name, X.clone()
        self.X_prev, self.psi = X.clone(), X.clone()
        self.Z, self.U_prev = torch.zeros_like(X), torch.zeros_like(X)

    def step(self, U: Agents, W: Weights) -> Agents:
        """X of the next iteration."""
        X, D = self.X, U - self.U_prev
        if self.name == "demuon":
            new = mix(W, X - U)
        elif self.name == "ed":
            psi = X - U
            new = mix(W, psi + X - self.psi)
            self.psi = psi
        elif self.name == "extra":
            new = mix(W, 2 * X - self.X_prev) - D
        elif self.name == "paper-ed":
            new = mix(W, mix(W, 2 * X - self.X_prev) - D)
        elif self.name == "paper-extra":
            inner = X - self.X_prev
            inner = X + (inner + mix(W, inner)) / 2 - D
            new = (inner + mix(W, inner)) / 2
        elif self.name == "non-atc-gt":
            self.Z = mix(W, self.Z) + D
            new = mix(W, X) - self.Z
        else:
            self.Z = mix(W, self.Z + D)
            new = mix(W, X - self.Z) if self.name == "atc-gt" else mix(W, X) - self.Z
        self.X_prev, self.U_prev, self.X = X, U, new
        return new


class Reference:
    """Algorithm 1 on N agents.

    Args:
        name: Of the backbone.
        X: At the start, equal on all agents.
        b: Weight of the past in M.
        tracks: Whether H tracks the mean of M; without, H = M (Proposition 4.5).
        polar: In place of msgn, on one stack.

    Example:
        >>> import torch
        >>> X = torch.zeros(2, 3, 2)
        >>> reference = Reference("ed", X, b=0.9)
        >>> W = torch.tensor([[0.75, 0.25], [0.25, 0.75]])
        >>> G = torch.stack([torch.ones(3, 2), -torch.ones(3, 2)])
        >>> for _ in range(3):
        ...     X = reference.step(G, 0.1, W)
        >>> bool(X.mean(0).abs().max() < 1e-6)  # the gradients of both cancel
        True
    """

    def __init__(
        self,
        name: str,
        X: Agents,
        b: float,
        *,
        tracks: bool = True,
        polar: Callable[[Agents], Agents] = msgn,
    ) -> None:
        self.backbone = Neighbours(name, X)
        self.b, self.tracks, self.polar = b, tracks, polar
        self.M: Agents | None = None
        self.H = torch.zeros_like(X)

    @property
    def X(self) -> Agents:  # noqa: N802
        """The parameters of all agents."""
        return self.backbone.X

    def step(self, G: Agents, a: float, W: Weights) -> Agents:
        """One iteration from the gradients at X; X of the next."""
        if self.M is None:
            self.M = self.H = G  # A1
        M = self.b * self.M + (1 - self.b) * G  # A2
        self.H = mix(W, self.H + M - self.M) if self.tracks else M  # A3
        self.M = M
        return self.backbone.step(a * self.polar(self.H), W)  # A4, A5 by N
