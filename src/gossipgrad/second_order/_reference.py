r"""Shampoo, SOAP and KL-Shampoo beside their papers: one matrix, whole, in the papers' letters.

No blocks, no stacks, no packed storage, no threads. It says what the fast optimizers must compute
for one block; it is not for training.

Letters
    W, G         m x n weights and gradient
    L, R         m x m and n x n factors; Q_L, Q_R: their eigenbases; d_L, d_R: eigenvalues
    M, V         exponential means of gradients and of squares
    b1, b2, b    their weights, and that of factors
    a            learning rate; e: of the root; u: damping; w: weight decay; k: calls so far, from 0
    T            calls from one refresh to the next; D: calls that a refresh is late
    p_L, p_R     calls of each window of T in which L's and R's refreshes are due

Rules. The comments in the code name the line that they implement.
    S1  M = b1 M + (1 - b1) G, in the original space; M' = Q_L^T M Q_R.
    S2  V = b2 V + (1 - b2) (Q_L^T G Q_R)^2.
    S3  W = W - a c Q_L (M' / (sqrt(V) + e)) Q_R^T, c = sqrt(1 - b2^k) / (1 - b1^k).
    S4  L = b L + (1 - b) G G^T, R = b R + (1 - b) G^T G.
    S5  Every T updates, Q = QR(L Q) with the columns of Q ordered by diag(Q^T L Q), and V with
        them; at first from Q = I, and no update (published code: the eigenvectors).
    (SOAP, Algorithm 3.)
    K1  M as S1; W = W - a Q_L (M' * s / (1 + e s)) Q_R^T, s = d_L^(-1/2) (x) d_R^(-1/2).
    K2  L = b L + (1 - b) / n G Q_R d_R^-1 Q_R^T G^T; R = b R + (1 - b) / m G^T Q_L d_L^-1 Q_L^T G.
    K3  d_L = b d_L + (1 - b) / n diag(Q_L^T G Q_R d_R^-1 Q_R^T G^T Q_L), d_R alike; both with the
        old ones; d^(-1/2) at most max(10, min(size, 4000)). They start at |G| / (m n)^(1/2), where
        the published code has 0.1, which is far above the gradients of most networks.
    K4  Every T updates Q = QR(L Q), in the order that there is; at first as S5, with G G^T / n.
    (KL-Shampoo, published code.)
    H1  S4, then every T calls X = (L / (1 - b^k) + u l I)^(-1/4), l the largest eigenvalue; Y alike
        from R.
    H2  M as S1, V = b2 V + (1 - b2) G^2; A = M^ / (sqrt(V^) + e), both over 1 - b^k.
    H3  D = X M^ Y; W = W - a D |A| / |D|.
    (Shampoo, Algorithm 1, with Adam's grafting.)
    W   All: W = (1 - a w) W before the update.
    D   A refresh is computed from the state of its call, and used from D calls later; the first
        ones, of L and of R, in call 0.
    C   Hierarchical mean (Asteria): a root is the mean over a node's ranks, then over nodes. A mean
        of roots is no root of the mean, and of bases no basis; under DDP it is each rank's own.

References:
    Vyas et al., arXiv:2409.11321. Lin et al., KL-Shampoo, 2025. Gupta et al., arXiv:1802.09568.
    Anil et al., arXiv:2002.09018.
"""

import torch
from jaxtyping import Float
from torch import Tensor

Matrix = Float[Tensor, "m n"]


class _Refreshed:
    """A root, computed every T calls and used from D calls later; the first immediately."""

    def __init__(self, T: int, D: int, p: int) -> None:
        self.T, self.D, self.p = T, D, p
        self.late: list[tuple[int, tuple[Tensor, ...]]] = []

    def take(self, k: int, compute):
        """Yield the root that is used from call k; what it changes, `compute` already sees."""
        if self.late and self.late[0][0] == k:
            yield self.late.pop(0)[1]
        if k == 0 or k % self.T == self.p:
            self.late.append((k + (self.D if k else 0), compute()))
        if self.late and self.late[0][0] == k:
            yield self.late.pop(0)[1]


def hierarchical_mean(roots: list[list[Matrix]]) -> Matrix:
    """C: the mean over nodes of the means over their ranks, as leaders would exchange it."""
    return torch.stack([torch.stack(node).mean(0) for node in roots]).mean(0)


class _Rules:
    """The letters, by keyword, and when roots are refreshed."""

    def __init__(self, T=10, D=0, p_L=0, p_R=None, **letters) -> None:
        self.left, self.right = (
            _Refreshed(T, D, p_L),
            _Refreshed(T, D, T // 2 if p_R is None else p_R),
        )
        for letter, value in letters.items():
            setattr(self, letter, value)


class SOAP(_Rules):
    """One matrix by SOAP."""

    a, b1, b2, b, e, w, k = 3e-3, 0.95, 0.95, 0.95, 1e-8, 0.01, -1

    def step(self, W: Matrix, G: Matrix) -> Matrix:
        """The next weights."""
        self.k += 1
        if self.k == 0:
            self.L, self.R = (1 - self.b) * G @ G.T, (1 - self.b) * G.T @ G
            self.M, self.V = torch.zeros_like(G), torch.zeros_like(G)
            self.Q_L, self.Q_R = torch.eye(len(self.L)).to(G), torch.eye(len(self.R)).to(G)
            return W
        for found in self.left.take(self.k - 1, lambda: self._basis(self.L, self.Q_L)):
            self.Q_L, i = found
            self.V = self.V[i]  # S5
        for found in self.right.take(self.k - 1, lambda: self._basis(self.R, self.Q_R)):
            self.Q_R, i = found
            self.V = self.V[:, i]
        b1, b2 = self.b1, self.b2
        self.M = b1 * self.M + (1 - b1) * G  # S1
        self.V = b2 * self.V + (1 - b2) * (self.Q_L.T @ G @ self.Q_R) ** 2  # S2
        c = (1 - b2**self.k) ** 0.5 / (1 - b1**self.k)
        N = self.Q_L.T @ self.M @ self.Q_R / (self.V.sqrt() + self.e)
        W = (1 - self.a * self.w) * W - self.a * c * self.Q_L @ N @ self.Q_R.T  # W, S3
        self.L = self.b * self.L + (1 - self.b) * G @ G.T  # S4
        self.R = self.b * self.R + (1 - self.b) * G.T @ G
        return W

    @staticmethod
    def _basis(F: Tensor, Q: Tensor) -> tuple[Tensor, ...]:
        i = (Q.T @ F @ Q).diagonal().argsort(descending=True)  # S5
        return torch.linalg.qr(F @ Q[:, i])[0], i


class KLShampoo(_Rules):
    """One matrix by KL-Shampoo."""

    a, b1, b, e, w, k = 3e-3, 0.9, 0.98, 1e-8, 0.01, -1

    def step(self, W: Matrix, G: Matrix) -> Matrix:
        """The next weights."""
        self.k += 1
        (m, n), b = G.shape, self.b
        if self.k == 0:
            self.L, self.R = (1 - b) / n * G @ G.T, (1 - b) / m * G.T @ G  # K4
            self.M = torch.zeros_like(G)
            d = G.square().mean().sqrt() if G.any() else torch.tensor(0.1)  # K3
            self.d_L = torch.full((m,), float(d)).to(G).clamp(min=max(10, min(m, 4000)) ** -2)
            self.d_R = torch.full((n,), float(d)).to(G).clamp(min=max(10, min(n, 4000)) ** -2)
            self.Q_L, self.Q_R = torch.eye(m).to(G), torch.eye(n).to(G)
            return W
        for found in self.left.take(self.k - 1, lambda: torch.linalg.qr(self.L @ self.Q_L)):  # K4
            self.Q_L = found[0]
        for found in self.right.take(self.k - 1, lambda: torch.linalg.qr(self.R @ self.Q_R)):
            self.Q_R = found[0]
        Q_L, Q_R, d_L, d_R = self.Q_L, self.Q_R, self.d_L, self.d_R
        self.M = self.b1 * self.M + (1 - self.b1) * G  # K1
        s = torch.outer(d_L**-0.5, d_R**-0.5)
        N = (Q_L.T @ self.M @ Q_R) * s / (1 + self.e * s)
        W = (1 - self.a * self.w) * W - self.a * Q_L @ N @ Q_R.T
        S = G @ Q_R @ torch.diag(1 / d_R) @ Q_R.T @ G.T / n  # K2
        Z = G.T @ Q_L @ torch.diag(1 / d_L) @ Q_L.T @ G / m
        self.L, self.R = b * self.L + (1 - b) * S, b * self.R + (1 - b) * Z
        self.d_L = b * d_L + (1 - b) * (Q_L.T @ S @ Q_L).diagonal()  # K3
        self.d_R = b * d_R + (1 - b) * (Q_R.T @ Z @ Q_R).diagonal()
        self.d_L = self.d_L.clamp(min=max(10, min(m, 4000)) ** -2)
        self.d_R = self.d_R.clamp(min=max(10, min(n, 4000)) ** -2)
        return W


class Shampoo(_Rules):
    """One matrix by Shampoo with Adam's grafting; u: damping."""

    a, b1, b2, b, u, e, w, k = 1e-3, 0.9, 0.99, 0.99, 1e-6, 1e-8, 0.01, 0

    def step(self, W: Matrix, G: Matrix) -> Matrix:
        """The next weights."""
        if self.k == 0:
            self.L, self.R = torch.zeros_like(G @ G.T), torch.zeros_like(G.T @ G)
            self.M, self.V = torch.zeros_like(G), torch.zeros_like(G)
        b1, b2, b = self.b1, self.b2, self.b
        self.L, self.R = b * self.L + (1 - b) * G @ G.T, b * self.R + (1 - b) * G.T @ G  # H1
        for found in self.left.take(self.k, lambda: self._root(self.L)):
            self.X = found[0]
        for found in self.right.take(self.k, lambda: self._root(self.R)):
            self.Y = found[0]
        self.k += 1
        self.M, self.V = b1 * self.M + (1 - b1) * G, b2 * self.V + (1 - b2) * G**2  # H2
        M = self.M / (1 - b1**self.k)
        A = M / ((self.V / (1 - b2**self.k)) ** 0.5 + self.e)
        D = self.X @ M @ self.Y  # H3
        return (1 - self.a * self.w) * W - self.a * D * (A.norm() / D.norm())

    def _root(self, F: Tensor) -> tuple[Tensor]:
        d, Q = torch.linalg.eigh(F / (1 - self.b ** (self.k + 1)))
        d = d.clamp(min=0) + self.u * d.max()
        return (Q @ torch.diag(d**-0.25) @ Q.T,)
