"""Derives the profiles of known networks: what a step costs on a named card, by a stated rule.

Forward, backward and update run on torch's meta device, where nothing is computed, while every
operation is counted and priced. Backward runs for real, so gradients come in torch's order.

The rule. An operation takes as long as its arithmetic or its memory traffic, whichever is longer:

    max(FLOPs / (arithmetic efficiency * peak), bytes / (memory efficiency * bandwidth))

* FLOPs are torch's own count (`torch.utils.flop_counter`): convolutions, matrix products and
  attention; other operations have none. A 3x3 convolution of stride 1 in one group counts for
  1/2.25, which is what Winograd's F(2x2, 3x3) multiplies, where the card's library uses it.
* Bytes are those of all tensors an operation reads and writes, each once; views cost nothing.
* The arithmetic efficiency is one number a card, set so that one published throughput comes out;
  the other networks' totals follow, and are held against published ones where there are any.

    python -m benchmarks.derive_profiles            # writes src/gossipgrad/planning/profiles/
    python -m benchmarks.derive_profiles --check    # says whether they are as derived
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks._vision import googlenet, resnet50, vision_loss
from gossipgrad.models import GPT, training_loss
from gossipgrad.planning import PROFILES, Profile

FOLDER = Path(__file__).parents[1] / "src" / "gossipgrad" / "planning" / "profiles"
_WINOGRAD = 2.25
_CONVOLUTIONS = {torch.ops.aten.convolution: 1, torch.ops.aten.convolution_backward: 2}
_WITHOUT_COST = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.new_empty,
    torch.ops.aten._unsafe_view,
}


@dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU: peak figures by its maker, and what share of them a training step reaches."""

    name: str
    peak_flops_per_second: float
    bytes_per_second: float
    arithmetic_efficiency: float
    memory_efficiency: float
    winograd: bool
    rule: str


P100 = Card(
    name="NVIDIA Tesla P100 (SXM2), fp32",
    peak_flops_per_second=10.6e12,
    bytes_per_second=732e9,
    arithmetic_efficiency=0.517,
    memory_efficiency=0.75,
    winograd=True,
    rule="set so that ResNet-50 in batches of 64 makes 219 images/s, as published by TensorFlow "
    "(tensorflow.org/performance/benchmarks, DGX-1, synthetic data, 2017)",
)
A100 = Card(
    name="NVIDIA A100 (SXM4, 40 GB), bf16",
    peak_flops_per_second=312e12,
    bytes_per_second=1555e9,
    arithmetic_efficiency=0.305,
    memory_efficiency=0.75,
    winograd=False,
    rule="set so that GPT-2 small in batches of 12 x 1024 tokens takes 135 ms a step, as published "
    "by nanoGPT (its README, with torch.compile)",
)


@dataclass(frozen=True)
class Network:
    """A network, its batch, and the card that it is derived for.

    `published_per_second` are samples: for ResNet-50 and GPT-2 what the efficiency was set by, for
    VGG-16 (the same page as ResNet-50) a check of the rule.
    """

    card: Card
    batch_size: int
    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    optimizer: Callable[[list[nn.Parameter]], Optimizer]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = training_loss
    dtype: torch.dtype = torch.float32
    published_per_second: float | None = None


def _images(batch_size: int) -> tuple[Tensor, Tensor]:
    return torch.empty(batch_size, 3, 224, 224), torch.empty(batch_size, dtype=torch.long)


def _tokens(batch_size: int) -> tuple[Tensor, Tensor]:
    inputs = torch.empty(batch_size, 1024, dtype=torch.long)
    return inputs, torch.empty_like(inputs)


def _vgg16() -> nn.Module:
    """Configuration D of Simonyan and Zisserman, 2015: 138,357,544 parameters."""
    layers: list[nn.Module] = []
    channels = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    layers += [nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers)


class _LanguageModel(nn.Module):
    """The large model of Zaremba et al., 2014, on Penn Treebank: 66,034,000 parameters.

    Dropout left out, which takes next to no time.
    """

    def __init__(self, words: int = 10_000, width: int = 1500) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.decoder = nn.Linear(width, words)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(inputs))
        return self.decoder(hidden)


def _sentences(batch_size: int) -> tuple[Tensor, Tensor]:
    inputs = torch.empty(batch_size, 35, dtype=torch.long)
    return inputs, torch.empty_like(inputs)


_momentum = partial(SGD, lr=0.1, momentum=0.9)
NETWORKS = {
    "resnet50": Network(
        P100,
        64,
        lambda: resnet50(1000),
        _images,
        _momentum,
        vision_loss,
        published_per_second=219.0,
    ),
    "googlenet": Network(P100, 64, lambda: googlenet(1000), _images, _momentum, vision_loss),
    "vgg16": Network(P100, 64, _vgg16, _images, _momentum, published_per_second=154.0),
    "lstm": Network(P100, 20, _LanguageModel, _sentences, partial(SGD, lr=1.0)),
    "gpt2": Network(
        A100,
        12,
        # GPT-2 small: 124,439,808 parameters, the token embedding shared with the last layer
        lambda: GPT(50257, context=1024, layers=12, width=768, heads=12),
        _tokens,
        AdamW,
        dtype=torch.bfloat16,
        published_per_second=12 / 0.135,
    ),
}
assert set(NETWORKS) == set(PROFILES)


class Clock(TorchDispatchMode):
    """Prices every operation under it; `seconds` is the time so far."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self.seconds = 0.0
        self._card = card

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if not func.is_view and packet not in _WITHOUT_COST:
            self.seconds += self._price(packet, args, kwargs or {}, result)
        return result

    def _price(self, packet: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> float:
        card = self._card
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        moved_bytes = sum(t.numel() * t.itemsize for t in tensors)
        flops = 0.0
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=result)
            if card.winograd and _winograd_takes(packet, args):
                flops /= _WINOGRAD
        return max(
            flops / (card.arithmetic_efficiency * card.peak_flops_per_second),
            moved_bytes / (card.memory_efficiency * card.bytes_per_second),
        )


class FusedAttention(TorchFunctionMode):
    """Attention by the kernel that a GPU would take; torch picks none on the meta device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        fused = torch.ops.aten._scaled_dot_product_flash_attention
        return fused(*args, kwargs["dropout_p"], kwargs["is_causal"])[0]


def _winograd_takes(packet: Any, args: tuple) -> bool:
    place = _CONVOLUTIONS.get(packet)
    if place is None:
        return False
    weight = args[place]
    stride = args[3 if place == 1 else 4]
    groups = args[8] if place == 1 else args[9]
    return tuple(weight.shape[-2:]) == (3, 3) and set(stride) == {1} and groups == 1


def derive(name: str) -> Profile:
    """The profile of one of `NETWORKS`."""
    network = NETWORKS[name]
    with torch.device("meta"):
        model = network.make().to(network.dtype)
        inputs, target = network.batch(network.batch_size)
        if inputs.is_floating_point():
            inputs = inputs.to(network.dtype)
    parameters = dict(model.named_parameters())
    clock = Clock(network.card)
    ready: list[tuple[str, float]] = []
    for parameter_name, parameter in parameters.items():
        parameter.register_post_accumulate_grad_hook(
            lambda _, known=parameter_name: ready.append((known, clock.seconds))
        )
    with FusedAttention(), clock:
        loss = network.loss(model, inputs, target)
        forward_seconds = clock.seconds
        loss.backward()
    update_seconds, state_copies = _update(network, list(parameters.values()))
    card, names = network.card, tuple(known for known, _ in ready)
    times = [forward_seconds, *(seconds for _, seconds in ready)]
    return Profile(
        name=name,
        device=card.name,
        source=_source(card),
        batch_size=network.batch_size,
        forward_seconds=_short(forward_seconds),
        optimizer_seconds=_short(update_seconds),
        names=names,
        elements=tuple(parameters[known].numel() for known in names),
        backward_seconds=tuple(_short(after - before) for before, after in pairwise(times)),
        state_copies=state_copies,
    )


def _update(network: Network, parameters: list[nn.Parameter]) -> tuple[float, int]:
    """Seconds of an update, and tensors of state for each parameter.

    The optimizer reads gradients, and reads and writes weights and state, once, all in fp32. That
    is what a fused kernel does, with master weights in fp32 whatever type computes.
    """
    masters = [nn.Parameter(torch.empty(p.shape, device="meta")) for p in parameters]
    for master in masters:
        master.grad = torch.empty_like(master)
    optimizer = network.optimizer(masters)
    optimizer.step()  # makes the state
    elements = sum(master.numel() for master in masters)
    state = sum(
        value.numel()
        for master in masters
        for value in optimizer.state[master].values()
        if isinstance(value, Tensor) and value.shape == master.shape
    )
    moved_bytes = 4 * (elements + 2 * elements + 2 * state)
    seconds = moved_bytes / (network.card.memory_efficiency * network.card.bytes_per_second)
    return seconds, state // elements


def _source(card: Card) -> str:
    winograd = (
        ", 3x3 convolutions of stride 1 counted at 1/2.25 (Winograd)" if card.winograd else ""
    )
    return (
        "derived by benchmarks/derive_profiles.py: each operation takes the longer of FLOPs / "
        f"({card.arithmetic_efficiency:g} x {card.peak_flops_per_second / 1e12:g} TFLOP/s) and "
        f"bytes / ({card.memory_efficiency:g} x {card.bytes_per_second / 1e9:g} GB/s){winograd}; "
        f"the first efficiency is {card.rule}; the second is assumed"
    )


def _short(seconds: float) -> float:
    return float(f"{seconds:.5g}")


def text(profile: Profile) -> str:
    """The profile's file: JSON with a line a parameter."""
    value = profile.to_json()
    rows = ",\n    ".join(json.dumps(row) for row in value.pop("parameters"))
    head = json.dumps(value, indent=2).removesuffix("\n}")
    return f'{head},\n  "parameters": [\n    {rows}\n  ]\n}}\n'


def main() -> int:
    """Derives all, prints their totals, and writes or compares."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args()
    differing = 0
    for name in NETWORKS:
        profile = derive(name)
        path = FOLDER / f"{name}.json"
        if not options.check:
            FOLDER.mkdir(exist_ok=True)
            path.write_text(text(profile), encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text(profile):
            print(f"{path} is not as derived", file=sys.stderr)
            differing += 1
        published = NETWORKS[name].published_per_second
        known = "" if published is None else f" (published {published:.1f})"
        print(
            f"{name:10} {profile.size_bytes / 1e6:.1f} MB, {1e3 * profile.compute_seconds:.1f} ms, "
            f"{profile.batch_size / profile.compute_seconds:.1f} samples/s{known}, {profile.device}"
        )
    return differing


if __name__ == "__main__":
    sys.exit(main())
