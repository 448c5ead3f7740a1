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
        after merging.)
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
    R11 Split and reduce, for large p: rank r sends I_r by owner; of the sums S_o of an owner o's
        coordinates the k / p largest are applied, in place of R5; e[i] = a[i], u[i] = u[i] before
        R8, for the coordinates i of I_r that are not. (Ok-Topk's phases, and gTop-k's residuals.)
    R12 Local clipping: g_r is scaled to the norm c sqrt(p) over all tensors, if it is longer.
        (Deep Gradient Compression 3.2: g_r / p to c / sqrt(p).)

Deviations from the authors' code
    1. Groups of `Reference` are given; `merge` finds those of R10, and decides on the first two
       tensors, too, which the published code always binds together, while its times say that it
       has not. The session's own plan is the optimum: `gossipgrad.planning.plan`.
    2. Residuals belong to tensors and not to groups: another plan takes them over.
    3. R9. The published code adds what is not finite to the residual, which then stays so.
    4. Ties are broken by index, where `torch.topk` makes no promise.
    5. What rounding takes away on the wire stays in the residual (R4); theirs sends fp32. With R11
       the owner keeps what rounding takes of S.
    6. R11 has parts of fixed size: an owner gets at most K = ceil(k / p + 3 sqrt(k / p))
       coordinates of a rank; the others stay in e. Owners hold one coordinate of each p, in an
       order that a hash turns; Ok-Topk's are stretches of equal load, found again and again.

References:
    Shi et al., Communication-Efficient Distributed Deep Learning with Merged Gradient
    Sparsification on GPUs, INFOCOM 2020; HKBU-HPML/OMGS-SGD, `hv_distributed_optimizer.py`,
    `compression.py`.
    Shi et al., Layer-wise Adaptive Gradient Sparsification, arXiv:1911.08727 (LAGS-SGD).
    Lin et al., Deep Gradient Compression, arXiv:1712.01887.
    Shi et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification,
    ICDCS 2019 (gTop-k). Li & Hoefler, Near-Optimal Sparse Allreduce, PPoPP 2022 (Ok-Topk).
"""

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.optim import Optimizer


def top_k(a: Float[Tensor, " n"], k: int) -> Int[Tensor, " k"]:
    """Return I: the k largest magnitudes, of equal ones the first; NaN, then inf, rank highest."""
    magnitude = a.abs().nan_to_num(nan=torch.inf, posinf=torch.finfo(a.dtype).max)
    return magnitude.sort(descending=True, stable=True).indices[:k].sort().values  # R3


def owners(n: int, p: int) -> Int[Tensor, " n"]:
    """Return the rank that adds up each coordinate (R11)."""
    row, column = torch.arange(n) // p, torch.arange(n) % p
    return (column + ((row * 0x9E3779B1 & 0xFFFFFFFF) >> 8)) % p


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
        value_dtype: The type of values on the wire, None for that of the residuals.
        momentum: m of R8, None for none.
        split: Whether sparsified groups are added up by R11.
        clip: c of R12, None for none.

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
        value_dtype: torch.dtype | None = None,
        momentum: float | None = None,
        split: bool = False,
        clip: float | None = None,
    ) -> None:
        self.split, self.c = split, clip
        self.p = len(models)
        self.t = 0
        self.models, self.optimizers = list(models), list(optimizers)
        self.tensors = [list(reversed(list(model.parameters()))) for model in models]
        if sum(groups) != len(self.tensors[0]):
            raise ValueError(
                f"groups of {list(groups)} tensors are {sum(groups)}, there are "
                f"{len(self.tensors[0])}"
            )
        self.groups, self.m = list(groups), momentum
        self.sparse = [True] * len(groups) if sparse is None else list(sparse)
        self.rho = density if callable(density) else lambda t: density
        self.value_dtype = value_dtype
        self.e = [[_wide_zeros(w) for w in tensors] for tensors in self.tensors]
        self.u = [[_wide_zeros(w) for w in tensors] for tensors in self.tensors]

    @torch.no_grad()
    def step(self) -> None:
        """Make one step of all ranks: selection, aggregation and the update."""
        if self.c is not None:
            for w in self.tensors:
                nn.utils.clip_grad_norm_(w, self.c * math.sqrt(self.p))  # R12
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
        tensors = range(first, first + count)
        sizes = [self.tensors[0][i].numel() for i in tensors]
        total = torch.zeros(sum(sizes), dtype=self.e[0][first].dtype)
        a = [self._selected_from(r, tensors) for r in range(self.p)]
        if not sparse or self.rho(self.t) >= 1:
            for r in range(self.p):
                total += a[r]  # R7
                self._keep(self.e[r], tensors, torch.zeros_like(total))
            return total / self.p
        chosen = [self._choose(each) for each in a]
        if self.split:
            chosen = [self._with_room(each, len(total)) for each in chosen]
        for r in range(self.p):  # R5: in this order
            total[chosen[r]] += self._on_the_wire(a[r][chosen[r]])
        rounded = torch.zeros_like(total)
        if self.split:
            total, rounded = self._largest_sums(total, max(int(self.rho(self.t) * len(total)), 1))
        for r in range(self.p):
            applied = chosen[r][total[chosen[r]] != 0] if self.split else chosen[r]
            e = a[r].clone()
            e[applied] = a[r][applied] - self._on_the_wire(a[r][applied])  # R4
            mine = owners(len(total), self.p) == r
            e[mine] += rounded[mine]
            u = torch.cat([self.u[r][i].flatten() for i in tensors])
            u[applied] = 0  # R8
            self._keep(self.u[r], tensors, u)
            self._keep(self.e[r], tensors, e)
        return total / self.p  # R5

    def _on_the_wire(self, values: Tensor) -> Tensor:
        return values if self.value_dtype is None else values.to(self.value_dtype).to(values.dtype)

    def _with_room(self, chosen: Int[Tensor, " k"], n: int) -> Int[Tensor, " sent"]:
        """Return the first of each owner's coordinates, as many as a part holds."""
        average = len(chosen) / self.p
        room = math.ceil(average + 3 * math.sqrt(average))
        of = owners(n, self.p)[chosen]
        return torch.cat([chosen[of == owner][:room] for owner in range(self.p)]).sort().values

    def _largest_sums(self, total: Float[Tensor, " n"], k: int) -> tuple[Tensor, Tensor]:
        """Return the sums that owners select, on the wire, and what rounding takes of them."""
        kept, rounded = torch.zeros_like(total), torch.zeros_like(total)
        for owner in range(self.p):
            mine = (owners(len(total), self.p) == owner).nonzero().flatten()
            largest = mine[top_k(total[mine], min(len(mine), max(1, k // self.p)))]
            kept[largest] = self._on_the_wire(total[largest])
            rounded[largest] = torch.where(kept[largest] == 0, 0, total[largest] - kept[largest])
        return kept, rounded

    def _selected_from(self, r: int, tensors: range) -> Float[Tensor, " n"]:
        parts = []
        for i in tensors:
            w = self.tensors[r][i]
            g = torch.zeros_like(self.e[r][i]) if w.grad is None else w.grad.to(self.e[r][i].dtype)
            if self.m is not None:
                self.u[r][i] = g = self.m * self.u[r][i] + g  # R8
            parts.append((self.e[r][i] + g).flatten())  # R2
        return torch.cat(parts)  # R1

    def _choose(self, a: Float[Tensor, " n"]) -> Int[Tensor, " chosen"]:
        return top_k(a, max(int(self.rho(self.t) * a.numel()), 1))

    def _keep(self, kept: list[Tensor], tensors: range, flat: Float[Tensor, " n"]) -> None:
        """Split a group's new e or u."""
        sizes = [kept[i].numel() for i in tensors]
        for i, piece in zip(tensors, flat.split(sizes), strict=True):
            kept[i] = piece.view_as(kept[i]).clone()

    def _write(self, r: int, first: int, count: int, total: Float[Tensor, " n"]) -> None:
        start = 0
        for i in range(first, first + count):
            w = self.tensors[r][i]
            w.grad = total[start : start + w.numel()].view_as(w).to(w.dtype)
            start += w.numel()


def _wide_zeros(w: Tensor) -> Tensor:
    return torch.zeros(w.shape, dtype=torch.promote_types(w.dtype, torch.float32))
