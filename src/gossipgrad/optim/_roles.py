"""The choice of parameters that an optimizer of matrices updates; AdamW updates the rest."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList

from gossipgrad._messages import warn

__all__ = ["ADAMW", "Owner", "choose_roles", "fitting", "is_named_hidden", "owners_of"]

ADAMW = "adamw"

# What a module of the user's own does with a parameter cannot be seen: names say it.
_HEADS = re.compile(
    r"(^|_)(heads?|classifier|logits|score|policy|actor|critic)(_\d+)?$"
    r"|^(out|outputs?|out_conv|conv_out|fc_out|embed_out|decoder|final|final_conv|last)$"
)
_NO_HEADS = re.compile(r"(^|[._])(time|emb)")  # a last layer inside of these is hidden
_NO_MATRICES = re.compile(
    r"(^|_)(a_log|bias|scales?|gamma|alpha|beta|gain|masks?|tokens?|query|queries|prompts?|latents?"
    r"|prototypes?|codebook|table|pos|positions?|positional|r_k|router"
    r"|time_(mix|maa|decay|first|faaaa))(_|$)|embed"
)
_EMBEDDINGS = re.compile(r"embed|(^|_)emb$|^wte$|^wpe$")
_EXPERTS = re.compile("expert")


class Owner(NamedTuple):
    """The module that computes with a parameter."""

    name: str
    module: nn.Module  # for a parametrized weight the layer itself
    parameter: str  # its name there: "weight" for what weight or spectral norm scales


def owners_of(model: nn.Module) -> dict[str, Owner]:
    """Return the owner of each parameter by name; a shared one has its first name."""
    modules = dict(model.named_modules())
    owners: dict[str, Owner] = {}
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        if isinstance(modules[path], ParametrizationList):
            path, _, kept = path.rpartition(".parametrizations.")
            shape = getattr(modules[path], kept).shape
            leaf = kept if parameter.shape == shape else leaf
        elif leaf in ("weight_v", "weight_orig"):  # older forms of weight and spectral norm
            leaf = "weight"
        owners[name] = Owner(path, modules[path], leaf)
    return owners


def choose_roles(
    model: nn.Module,
    role: str,
    *,
    matrices: Sequence[str] = (),
    adamw: Sequence[str] = (),
    with_head: bool = False,
    with_stacks: bool = False,
    argument: str = "matrices",
) -> dict[str, str]:
    """Return the role of each parameter by name; a shared one has its first name.

    Frozen parameters have a role, too: they may be trained later.

    `role` goes to what maps features to features: weights of linear layers, kernels of convolutions
    between channels, recurrent weights, and a module's own 2-D parameters. AdamW updates everything
    else: vectors, also of shape (n, 1); embeddings; parameters of norms and gains of weight norm;
    depthwise kernels; routers; the head; and parameters whose name says that they act element by
    element (`A_log`, `time_mix`, `position`, ...).

    The head is what is named so outside of blocks (`lm_head`, `classifier`, `conv_out`, ...), and
    the last linear layer or convolution, unless it is in a repeated block or in one of a
    `ModuleList`, or there are no other matrices.

    Args:
        model: The model.
        role: The role of matrices.
        matrices: Patterns of names, such as `"blocks.*.experts"`, that always get `role`.
        adamw: Patterns of names that AdamW always updates.
        with_head: Whether the head counts as a matrix, unless it is tied to an embedding.
        with_stacks: Whether 3-D parameters of experts count as matrices.
        argument: The public name of `matrices`, for messages.

    Raises:
        ValueError: A pattern fits no parameter, two fit one, or a vector would get `role`.
    """
    owners = owners_of(model)
    named = {
        name: p
        for name, p in model.named_parameters()
        if p.requires_grad or p.is_floating_point()  # frozen integers are never trained
    }
    embedded = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.EmbeddingBag) or "Embedding" in type(module).__name__
        for p in module.parameters(recurse=False)
    }
    experts = _experts(model)
    largest = 3 if with_stacks else 2
    roles = {
        name: role
        if id(p) not in embedded and _is_matrix(p, owners[name], experts, largest)
        else ADAMW
        for name, p in named.items()
    }
    heads = set() if with_head else _heads(model, owners) & named.keys()
    if any(each == role and name not in heads for name, each in roles.items()):
        roles |= dict.fromkeys(heads, ADAMW)
    chosen, chosen_adamw = fitting(named, matrices, argument), fitting(named, adamw, "adamw")
    if both := sorted(chosen & chosen_adamw):
        raise ValueError(
            f"{both[0]!r} fits a pattern of {argument}= and one of adamw=: name it in one"
        )
    for name in sorted(chosen):
        if named[name].ndim < 2:
            raise ValueError(
                f"{argument}= names {name!r} of shape {tuple(named[name].shape)}: it takes "
                "matrices, and tensors of more dimensions as stacks of them"
            )
        rows, *others = shape = tuple(named[name].shape)
        is_kernel = isinstance(owners[name].module, _ConvNd)
        if rows > 1 < len(others) and not (is_kernel or with_stacks):
            warn(
                f"{argument}= names {name!r} of shape {shape}, which is updated as one matrix of "
                f"{rows} x {math.prod(others)}. If it is a stack of matrices, such as experts, "
                "keep each as a parameter of its own, or name it in adamw="
            )
    return roles | dict.fromkeys(chosen, role) | dict.fromkeys(chosen_adamw, ADAMW)


def is_named_hidden(name: str, *, with_head: bool = False) -> bool:
    """Whether a matrix of which only the name is known is neither an embedding nor a head."""
    path, _, leaf = name.rpartition(".")
    module = path.rpartition(".")[2]
    is_head = not with_head and _HEADS.search(module)
    return not (_EMBEDDINGS.search(module) or is_head or _NO_MATRICES.search(leaf.lower()))


def fitting(named: Iterable[str], patterns: Iterable[str], argument: str) -> set[str]:
    """Return the names that fit one of the patterns; raise `ValueError` if a pattern fits none."""
    if isinstance(patterns, str):
        raise ValueError(f"{argument}={patterns!r} is one text: give a list of patterns of names")
    found: set[str] = set()
    for pattern in patterns:
        fits = {name for name in named if fnmatchcase(name, pattern)}
        if not fits:
            some = ", ".join(map(repr, list(named)[:4]))
            raise ValueError(
                f"{argument}= names {pattern!r}, which fits no parameter; the model has {some}, ..."
            )
        found |= fits
    return found


def _is_matrix(parameter: Tensor, owner: Owner, experts: dict[str, set[int]], largest: int) -> bool:
    """Whether it maps features to features; embeddings and heads are told apart elsewhere."""
    path, module, leaf = owner
    if isinstance(module, _ConvNd):
        groups = module.groups
        is_vector = module.out_channels == groups or parameter.numel() == parameter.shape[0]
        is_depthwise = module.in_channels == groups > 1
        return leaf == "weight" and not (is_vector or is_depthwise)
    if not 2 <= parameter.ndim <= largest or min(parameter.shape[-2:]) == 1:
        return False
    around, _, own = path.rpartition(".")
    is_gate = own == "gate" and parameter.shape[0] in experts.get(around, ())
    if is_gate or "router" in path.lower():
        return False
    if isinstance(module, nn.Linear | nn.RNNBase | nn.RNNCellBase | nn.MultiheadAttention):
        return parameter.ndim == 2
    if "Norm" in type(module).__name__ or _NO_MATRICES.search(leaf.lower()):
        return False
    return parameter.ndim == 2 or bool(_EXPERTS.search(f"{path}.{leaf}".lower()))


def _experts(model: nn.Module) -> dict[str, set[int]]:
    """Return how many experts a module has, by its name: in a list, or in stacks of matrices."""
    found: dict[str, set[int]] = {}
    for name, module in model.named_modules():
        around, _, own = name.rpartition(".")
        if _EXPERTS.search(own.lower()):
            counts = {p.shape[0] for p in module.parameters(recurse=False) if p.ndim == 3}
            if isinstance(module, nn.ModuleList | nn.ModuleDict):
                counts.add(len(module))
            found.setdefault(around, set()).update(counts)
    return found


def _heads(model: nn.Module, owners: dict[str, Owner]) -> set[str]:
    """Return the names of the weights that make the outputs, by names and order of modules."""
    lists = {name for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    own = {owner.name: name for name, owner in owners.items() if owner.parameter == "weight"}
    shared = {id(p): name for name, p in model.named_parameters()}  # a tied head is one, too
    kernels = {
        path: own.get(path) or shared[id(module.weight)]
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | _ConvNd)
    }
    alike = Counter(map(_without_numbers, kernels))
    last_in: dict[str, str] = {}
    for path in kernels:
        for above in _above(path):
            last_in[above] = path
    outside = [
        path
        for path in kernels
        if alike[_without_numbers(path)] == 1
        and not any(above.rpartition(".")[0] in lists for above in _above(path) if above)
    ]
    found = []
    for path in outside:
        around, _, own = path.rpartition(".")
        is_of_list = own.isdigit() and around in lists
        if own.isdigit() and (is_of_list or last_in[around] == path):
            own = around.rpartition(".")[2]
        if _HEADS.search(own):
            found.append(path)
    last = [path for path in kernels if not _NO_HEADS.search(path)][-1:]
    return {kernels[path] for path in (*found, *last) if path in outside}


def _above(path: str) -> list[str]:
    """Return the names of the modules around one, the model's "" last."""
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, -1, -1)]


def _without_numbers(path: str) -> str:
    """Return the name without the numbers of the blocks around it."""
    return re.sub(r"(^|[._])\d+(?=\.)", r"\1*", path)
