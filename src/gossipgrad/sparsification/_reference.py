r"""OMGS-SGD beside its authors' code: p replicas in one process, in the paper's letters.

No `torch.distributed`, no buffers that are used again, no hooks, no threads: every rank is served
in turn. It says what a session must compute; it is not for training.

Letters
    p            world size; r: rank; t: number of the step, counted from 0
    l            a tensor, counted in the order in which backward finishes gradients
    G            a group: consecutive tensors, concatenated; n: its elements
    rho_t        density; k = max(floor(rho_t n), 1): coordinates that are sent of a group
    g_r          gradient of rank r; e_r: its residual, what error feedback carries over
    a_r          e_r + g_r, what is selected from
    I_r          the k coordinates of a_r that are largest in magnitude; of equal ones the first
    q(.)         what the wire carries: a cast to the type of values, if one is given
    u_r, m       velocity and its factor, with momentum correction
    t_b, p       backward time and elements of each tensor
    t_s(n)       seconds to select from n elements; t_c(n): to send what was selected of them
    tau_b, tau_s, tau_c   when backward, selection and communication of a tensor begin
    t_w, t_save  what waiting for the next tensor costs a group, and what sending both at once saves

Rules. The comments in the code name the rule that a line implements.
    R1  Merging. Gradients are concatenated by group, groups in the order of backward, and
        selection is from the whole group. (Authors' code, `_push_to_buffer`; sparsification comes
        after merging.) With select "per_tensor" each tensor has a k of its own. (LAGS-SGD.)
    R2  Error feedback. a = e + g. (`TopKCompressor.compress`: `tensor.add_(residual)`.)
    R3  Selection. I = top-k of |a|, k = max(int(n rho), 1). (`TopKCompressor.compress`.)
    R4  e = a, with e[I] = 0. (`TopKCompressor.compress`.) With a narrow q: e[I] = a[I] - q(a[I]).
    R5  Aggregation. G = 0; for r = 0, ..., p - 1 in this order: G[I_r] += q(a_r[I_r]); then
        G = G / p. (`_sparse_allreduce_async`, `synchronize`.)
    R6  Update. Every rank's optimizer takes G for its gradient. (`step`.)
    R7  A group that is not sparsified, or all of which is sent:
        G = (a_0 + ... + a_(p-1)) / p, e = 0.
    R8  Momentum correction: u = m u + g, a = e + u, and u[I] = 0 besides (factor masking).
        (Deep Gradient Compression, Algorithm 1 and section 3.2; `DGCSGDMemory.compensate`.)
    R9  A step whose G is not finite anywhere leaves e and u as they were, on all ranks; G is NaN
        everywhere then, so that no optimizer takes a part of the step that another leaves out.
    R10 Merging rule: the group of l is merged with the next tensor iff t_w < t_save, where
            tau_s(l) = tau_b(l) + t_b(l)
            tau_c(l) = max(tau_c(l-1) + t_c(l-1), tau_s(l) + t_s(l))
            t_w      = t_b(l+1) + t_s(p_l + p_l+1) - t_s(p_l) - t_s(p_l+1)
                       - (tau_c(l) - (tau_s(l) + t_s(l)))
            t_save   = t_c(p_l) + t_c(p_l+1) - t_c(p_l + p_l+1)
        and times of a merged tensor are those of its parts, added. (`_generate_groups_mgs`.)

Deviations from the authors' code
    1. Groups of `Reference` are given; `merge` finds those of R10, and decides on the first two
       tensors, too, which the published code always binds together, while its times say that it
       has not. The session's own plan is the optimum: `gossipgrad.planning.plan`.
    2. Residuals belong to tensors and not to groups: another plan takes them over.
    3. R9. The published code adds what is not finite to the residual, which then stays so.
    4. Ties are broken by place, where `torch.topk` makes no promise.
    5. What rounding takes away on the wire stays in the residual (R4); theirs sends fp32.

References:
    Shi et al., Communication-Efficient Distributed Deep Learning with Merged Gradient
    Sparsification on GPUs, INFOCOM 2020; HKBU-HPML/OMGS-SGD, `hv_distributed_optimizer.py`,
    `compression.py`.
    Shi et al., Layer-wise Adaptive Gradient Sparsification, arXiv:1911.08727 (LAGS-SGD).
    Lin et al., Deep Gradient Compression, arXiv:1712.01887.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.optim import Optimizer

SELECTIONS = ("per_group", "per_tensor")


def top_k(a: Float[Tensor, " n"], k: int) -> Int[Tensor, " k"]:
    """Return I: the k largest magnitudes, of equal ones the first; NaN, then inf, rank highest."""
    magnitude = a.abs().nan_to_num(nan=torch.inf, posinf=torch.finfo(a.dtype).max)
    return magnitude.sort(descending=True, stable=True).indices[:k].sort().values  # R3


def merge(
    t_b: Sequence[float | int],
    p: Sequence[int],
    t_s: Callable[[int], float],
    t_c: Callable[[int], float],
) -> list[int]:
    """Return each group's number of tensors by the paper's rule (R10), in the order of backward.

    As in the authors' code, all times are computed again after each merge.

    Example:
        >>> merge([1, 3, 3], [10, 1, 1], lambda n: 0.1 * n, lambda n: 4 + 0.5 * n)
        [3]
    """
    L = len(p)
    t_b, p, merged = list(map(float, t_b)), list(p), [1] * L
    for l in range(L - 1):  # noqa: E741
        tau_b = tau_c = busy = ready = 0.0
        for i in range(l + 1):  # tensors merged into a later one take no time
            if not p[i]:
                continue
            tau_s = tau_b + t_b[i]
            tau_c = max(busy, tau_s + t_s(p[i]))  # R10
            busy = tau_c + t_c(p[i])
            tau_b = ready = tau_s + t_s(p[i])
        t_w = t_b[l + 1] + t_s(p[l] + p[l + 1]) - t_s(p[l]) - t_s(p[l + 1]) - (tau_c - ready)
        t_save = t_c(p[l]) + t_c(p[l + 1]) - t_c(p[l] + p[l + 1])
        if t_w < t_save:  # R10
            t_b[l + 1], p[l + 1] = t_b[l + 1] + t_b[l], p[l + 1] + p[l]
            merged[l + 1] += merged[l]
            t_b[l], p[l], merged[l] = 0.0, 0, 0
    return [count for count in merged if count]


class Reference:
    """OMGS-SGD on p replicas in one process; the arithmetic that the session must reproduce.

    Set `.grad` on every replica, then call `step()`.

    Args:
        models: One replica per rank, all equal.
        optimizers: The optimizer of each replica.
        groups: The number of tensors in each group, in the order of backward, which is the reverse
            of `model.parameters()`.
        sparse: For each group whether it is sparsified; None: all are.
        density: rho, or a function from the step to it.
        select: "per_group" or "per_tensor" (R1).
        value_dtype: The type of values on the wire, None for that of the residuals.
        momentum: m of R8, None for none.

    Raises:
        ValueError: The groups do not cover the tensors.

    Example:
        >>> import torch
        >>> models = [torch.nn.Linear(2, 1, bias=False) for _ in range(2)]
        >>> for rank, model in enumerate(models):
        ...     _ = torch.nn.init.zeros_(model.weight)
        ...     model.weight.grad = torch.tensor([[1.0, 2.0 + rank]])
        >>> optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
        >>> reference = Reference(models, optimizers, [1], density=0.5)
        >>> reference.step()
        >>> models[0].weight.tolist(), reference.e[1][0].tolist()
        ([[0.0, -2.5]], [[1.0, 0.0]])
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        groups: Sequence[int],
        *,
        sparse: Sequence[bool] | None = None,
        density: float | Callable[[int], float] = 0.001,
        select: str = "per_group",
        value_dtype: torch.dtype | None = None,
        momentum: float | None = None,
    ) -> None:
        self.p = len(models)
        self.t = 0
        self.models, self.optimizers = list(models), list(optimizers)
        self.tensors = [list(reversed(list(model.parameters()))) for model in models]
        if sum(groups) != len(self.tensors[0]):
            raise ValueError(
                f"groups of {list(groups)} tensors are {sum(groups)}, there are "
                f"{len(self.tensors[0])}"
            )
        if select not in SELECTIONS:
            raise ValueError(f"select must be one of {SELECTIONS}, got {select!r}")
        self.groups, self.select, self.m = list(groups), select, momentum
        self.sparse = [True] * len(groups) if sparse is None else list(sparse)
        self.rho = density if callable(density) else lambda t: density
        self.value_dtype = value_dtype
        self.e = [[_wide_zeros(w) for w in tensors] for tensors in self.tensors]
        self.u = [[_wide_zeros(w) for w in tensors] for tensors in self.tensors]

    @torch.no_grad()
    def step(self) -> None:
        """Make one step of all ranks: selection, aggregation and the update."""
        before = [[[x.clone() for x in xs] for xs in state] for state in (self.e, self.u)]
        sums: list[Tensor] = []
        first = 0
        for number, count in enumerate(self.groups):
            sums.append(self._aggregate(first, count, sparse=self.sparse[number]))
            first += count
        if not all(bool(total.isfinite().all()) for total in sums):
            self.e, self.u = before  # R9
            sums = [torch.full_like(total, torch.nan) for total in sums]  # R9
        for r in range(self.p):
            first = 0
            for total, count in zip(sums, self.groups, strict=True):
                self._write(r, first, count, total)
                first += count
            self.optimizers[r].step()  # R6
        self.t += 1

    def _aggregate(self, first: int, count: int, *, sparse: bool) -> Float[Tensor, " n"]:
        """Return G of one group; change its e and u."""
        places = range(first, first + count)
        sizes = [self.tensors[0][i].numel() for i in places]
        total = torch.zeros(sum(sizes), dtype=self.e[0][first].dtype)
        for r in range(self.p):  # R5: in this order
            a = self._selected_from(r, places)
            if not sparse or self.rho(self.t) >= 1:
                total += a  # R7
                self._keep(self.e[r], places, torch.zeros_like(a))
                continue
            chosen = self._choose(a, sizes)
            sent = a[chosen]
            if self.value_dtype is not None:
                sent = sent.to(self.value_dtype).to(a.dtype)  # q
            total[chosen] += sent  # R5
            e = a.clone()
            e[chosen] = a[chosen] - sent  # R4
            u = torch.cat([self.u[r][i].flatten() for i in places])
            u[chosen] = 0  # R8
            self._keep(self.u[r], places, u)
            self._keep(self.e[r], places, e)
        return total / self.p  # R5

    def _selected_from(self, r: int, places: range) -> Float[Tensor, " n"]:
        parts = []
        for i in places:
            w = self.tensors[r][i]
            g = torch.zeros_like(self.e[r][i]) if w.grad is None else w.grad.to(self.e[r][i].dtype)
            if self.m is not None:
                self.u[r][i] = g = self.m * self.u[r][i] + g  # R8
            parts.append((self.e[r][i] + g).flatten())  # R2
        return torch.cat(parts)  # R1

    def _choose(self, a: Float[Tensor, " n"], sizes: Sequence[int]) -> Int[Tensor, " chosen"]:
        rho = self.rho(self.t)
        if self.select == "per_group":
            return top_k(a, max(int(rho * a.numel()), 1))
        chosen, start = [], 0
        for n in sizes:
            chosen.append(start + top_k(a[start : start + n], max(int(rho * n), 1)))
            start += n
        return torch.cat(chosen)

    def _keep(self, kept: list[Tensor], places: range, flat: Float[Tensor, " n"]) -> None:
        """Split a group's new e or u."""
        sizes = [kept[i].numel() for i in places]
        for i, piece in zip(places, flat.split(sizes), strict=True):
            kept[i] = piece.view_as(kept[i]).clone()

    def _write(self, r: int, first: int, count: int, total: Float[Tensor, " n"]) -> None:
        start = 0
        for i in range(first, first + count):
            w = self.tensors[r][i]
            w.grad = total[start : start + w.numel()].view_as(w).to(w.dtype)
            start += w.numel()


def _wide_zeros(w: Tensor) -> Tensor:
    return torch.zeros(w.shape, dtype=torch.promote_types(w.dtype, torch.float32))
