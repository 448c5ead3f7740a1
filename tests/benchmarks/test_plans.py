"""The page of plans says what was found, and its brute force knows better than no plan."""

import sys
from pathlib import Path

import pytest

from benchmarks import plans
from benchmarks._plans_page import fill_page
from gossipgrad.planning import Method

PAGE = Path(__file__).parents[2] / "docs" / "plan.md"


def test_the_page_is_what_the_command_fills_in(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    fill_page(page)
    assert page.read_text() == PAGE.read_text(), "run python -m benchmarks.plans"


def test_brute_force_finds_the_counter_example():
    method = Method(
        name="sparse",
        select_seconds=lambda elements: 0.1 * elements,
        communicate_seconds=lambda elements: 4 + 0.5 * elements,
    )
    step = [1.0, 3.0, 3.0], [10, 1, 1]
    assert plans.least(step, [method]) == pytest.approx(16.0)


def test_few_random_cases():
    found = plans.random_cases(one=6, three=3)
    assert found["one_method"]["largest_difference"] < plans.MISSED
    assert found["three_methods"]["largest_difference"] < plans.MISSED
    for figures in found["rules"].values():
        assert figures["mean_ratio"] > 1 - plans.MISSED
        assert 0 < figures["missed_share"] <= 1
    assert found["rules"]["single"]["missed_share"] < 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, []),
        ({"cpu_seconds": 1.1}, ["resnet50, 161 tensors, 8 ranks, 1Gbit: 1.10 s, above 1 s"]),
        ({"cpu_seconds": 9.9, "tensors": 1000}, []),
        ({"cpu_seconds": 11, "tensors": 1000}, ["11.00 s, above 10 s"]),
        ({"gap": 2.1e-3}, ["gap 2.1e-03, above 2.0e-03"]),
        ({"cpu_seconds": 2.0, "gap": 1.0}, ["2.00 s", "gap 1.0e+00"]),
    ],
)
def test_what_is_over_the_limits_is_told_and_fails(change, said, tmp_path, monkeypatch, capsys):
    row = {
        "profile": "resnet50",
        "tensors": 161,
        "world_size": 8,
        "bandwidth": "1Gbit",
        "cpu_seconds": 0.9,
        "gap": 1e-4,
        "groups": 3,
    } | change
    monkeypatch.setattr(plans, "timed_cases", lambda repeats: [row])
    monkeypatch.setattr(plans, "RESULTS", tmp_path)
    monkeypatch.setattr(plans, "write", lambda name, found: None)
    monkeypatch.setattr(sys, "argv", ["plans", "--part", "timed"])
    assert plans.main() == bool(said)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == len(said)
    for line, part in zip(told, said, strict=True):
        assert part in line
