"""What `gossipgrad plan` counts on the wire: what sessions, and DistributedDataParallel, send."""

from dataclasses import replace

import pytest
import torch
import tyro
from torch import nn

from gossipgrad.cli._plan import PlanOptions, all_methods, network_of
from gossipgrad.cli._plan_report import METHODS
from gossipgrad.compression import VALUE_DTYPES, SparseFormat
from gossipgrad.sparsification._merged import MergedGroup
from support.plan_command import SMALL, found, written


@pytest.mark.parametrize("dtype", VALUE_DTYPES)
def test_bytes_are_those_of_a_session(dtype):
    elements = 1_000_000
    profile = replace(
        SMALL,
        names=("a",),
        elements=(elements,),
        backward_seconds=(0.01,),
        element_bytes=dtype.itemsize,
    )
    options = PlanOptions(world_size=4, latency="0s", decode="0s", cast="0s")
    methods = all_methods(options, profile, network_of(options)[1])
    for name in METHODS:
        group = MergedGroup(
            [nn.Parameter(torch.zeros(elements, dtype=dtype))],
            name,
            world_size=4,
            per_tensor=False,
            value_dtype=None,
            momentum=None,
        )
        group.use_densities([0.001])
        size_bytes = methods[name].communicate_seconds(elements) / 8e-9
        assert size_bytes == pytest.approx(group.bytes_sent, rel=1e-3), name


@pytest.mark.parametrize("dtype", VALUE_DTYPES)
def test_values_travel_as_all_types_that_sessions_take(dtype):
    values = str(dtype).removeprefix("torch.")
    told = tyro.cli(PlanOptions, args=["--values", values, "--latency", "0s", "--decode", "0s"])
    sparse = all_methods(told, SMALL, network_of(told)[1])["sparse"]
    form = SparseFormat(10_000_000, 10_000, dtype)
    assert sparse.communicate_seconds(10_000_000) == pytest.approx(15 * 8e-9 * form.size_bytes)


def test_ddp_sends_gradients_as_they_are(capsys, tmp_path):
    """Its buckets and its bytes are of the model's type; a session's sums are wider."""
    for width, groups in ((2, 3), (4, 5), (8, 8)):
        sizes = [4 << 20] * 8
        rows = [[f"{place}", elements, 0.001] for place, elements in enumerate(sizes)]
        path = written(tmp_path, element_bytes=width, parameters=rows)
        told = found(capsys, path, "--rate", "10Gbit", "--latency", "0s")
        rivals = [each for each in told["alternatives"] if each["name"].startswith("Distributed")]
        assert [each["method"] for each in rivals] == (
            ["dense as is"] if width == 2 else ["dense", "fp16"]
        )
        assert [each["groups"] for each in rivals] == [groups] * len(rivals)
        # The first group is one tensor. From then on the links are never idle.
        assert rivals[0]["finish_seconds"] == pytest.approx(
            0.001 + 1.5 * width * sum(sizes) * 8e-10
        )
        mine = next(each for each in told["alternatives"] if each["name"].startswith("wfbp"))
        assert mine["finish_seconds"] == pytest.approx(
            0.001 + 1.5 * max(4, width) * sum(sizes) * 8e-10
        )


def test_rounding_pays_for_narrow_gradients_too(capsys, tmp_path):
    path = written(tmp_path, element_bytes=2)
    options = ("--rate", "10Gbit", "--latency", "1us", "--select", "1ms,20ns")
    told = found(capsys, path, *options)
    assert told["advice"].startswith("DistributedDataParallel by dense as is would take")
    assert told["advice"].endswith("again for the wire by --methods sparse,dense,bf16")
    allowed = found(capsys, path, *options, "--methods", "sparse,dense,bf16")
    assert "bf16" in {group["method"] for group in allowed["groups"]}
    assert allowed["step_seconds"] < told["step_seconds"]
    slow = found(capsys, path, *options, "--methods", "dense,bf16", "--cast", "20ns")
    assert slow["advice"].endswith("before it adds them up, and that does not")
