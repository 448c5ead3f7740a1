"""`gossipgrad simulate`."""

import json
import sys
from pathlib import Path

import pytest

from gossipgrad import cli
from gossipgrad.cli._units import rate_of, rate_text, seconds_of, seconds_text
from gossipgrad.planning import AffineCost
from gossipgrad.simulate import Curves, Network

SHORT = ["simulate", "--steps", "20", "--world-size", "4,16", "--bandwidth", "1Gbit"]


def cells(path):
    return {
        (cell["network"], cell["world_size"], cell["strategy"]): cell
        for cell in json.loads(path.read_text())["cells"]
    }


def test_a_table_a_network_and_the_same_figures_as_json(tmp_path, capsys):
    out = tmp_path / "figures.json"
    bandwidths = ["--bandwidth", "100Mbit,1Gbit"]
    assert cli.main([*SHORT, *bandwidths, "--jitter", "0", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "resnet50 on " in shown
    assert "100 Mbit/s, 50us" in shown
    assert "4 ranks" in shown
    found = cells(out)
    assert len(found) == 2 * 2 * 7
    gossip = found["1 Gbit/s, 50us", 16, "gossip"]
    # The payload is longer than the compute: 102.2 MB at a gigabit a second.
    assert gossip["step_seconds"] == pytest.approx(102228128 * 8e-9, rel=1e-3)
    assert gossip["bytes_sent_per_step"] == 102228128
    assert f"{1e3 * gossip['step_seconds']:.0f} ms" in shown
    local = found["100 Mbit/s, 50us", 4, "local"]
    assert local["efficiency"] == pytest.approx(1)
    assert found["1 Gbit/s, 50us", 4, "local"]["step_seconds"] == local["step_seconds"]


def test_options_reach_the_model(tmp_path):
    out = tmp_path / "figures.json"

    def step_seconds(*options, strategy="gossip", p=16):
        arguments = [*SHORT, "--jitter", "0", "--strategy", strategy, "--out", str(out), *options]
        assert cli.main(arguments) == 0
        return next(c["step_seconds"] for (_, n, _), c in cells(out).items() if n == p)

    plain = step_seconds()
    assert step_seconds("--wire", "bfloat16") == pytest.approx(plain / 2, rel=0.01)
    assert step_seconds("--rack-size", "4", "--uplink", "1Gbit") > 1.5 * plain
    assert step_seconds("--straggler", "10") > 2 * plain
    assert step_seconds("--stall", "5s", "--stall-probability", "0.2") > plain
    reduce = step_seconds(strategy="allreduce")
    slow = step_seconds("--latency", "10ms", strategy="allreduce")
    halved = step_seconds("--latency", "10ms", "--collective", "halving", strategy="allreduce")
    assert reduce < halved < slow


def test_a_measured_network_takes_the_place_of_a_rate(tmp_path):
    network, out = tmp_path / "network.json", tmp_path / "figures.json"
    fast = AffineCost(alpha_seconds=0.0, beta_seconds_per_byte=0.0)
    slow = AffineCost(alpha_seconds=0.0, beta_seconds_per_byte=1e-7)
    measured = Network(exchange=fast, links={(0, 1): slow}, world_size=4)
    network.write_text(json.dumps(measured.to_json()))
    arguments = ["simulate", "--network", str(network), "--world-size", "4,5", "--steps", "20"]
    assert cli.main([*arguments, "--strategy", "gossip", "--out", str(out)]) == 0
    figures = {p: cell for (_, p, _), cell in cells(out).items()}
    assert figures[4]["step_seconds"] > 2 * figures[5]["step_seconds"]  # the slow link is of 4


def test_curves_give_the_time_to_accuracy(tmp_path, capsys):
    curves, out = tmp_path / "curves.json", tmp_path / "figures.json"
    rows = [
        {"strategy": "allreduce", "accuracy_by_epoch_mean": [0.2, 0.6, 0.8]},
        {"strategy": "gossip", "accuracy_by_epoch_mean": [0.4, 0.7, 0.9]},
        {"strategy": "local", "accuracy_by_epoch_mean": [0.1, 0.2, 0.3]},
        {"strategy": "gossip", "lr_factor": 2.0, "accuracy_by_epoch_mean": [0.9]},
    ]
    shared = {"model": "mlp", "world_size": 4, "steps_per_epoch": 100}
    curves.write_text(json.dumps({"rows": [shared | row for row in rows]}))
    arguments = [*SHORT, "--curves", str(curves), "--strategy", "gossip,allreduce,agd,local"]
    assert cli.main([*arguments, "--out", str(out)]) == 0
    found = {(p, name): cell for (_, p, name), cell in cells(out).items()}
    gossip = found[4, "gossip"]
    assert gossip["target_accuracy"] == pytest.approx(0.795)
    assert gossip["seconds_to_accuracy"] == pytest.approx(247.5 * gossip["step_seconds"])
    assert found[4, "allreduce"]["seconds_to_accuracy"] == pytest.approx(
        297.5 * found[4, "allreduce"]["step_seconds"]
    )
    assert found[4, "agd"]["seconds_to_accuracy"] == pytest.approx(
        297.5 * found[4, "agd"]["step_seconds"]
    )
    assert found[4, "local"]["seconds_to_accuracy"] is None
    assert found[16, "gossip"]["target_accuracy"] is None
    assert "not reached" in capsys.readouterr().out
    # Of other partners or a narrower wire there is no curve.
    for other in (["--topology", "matching"], ["--wire", "bfloat16"]):
        assert cli.main([*arguments, *other, "--out", str(out)]) == 0
        assert cells(out)["1 Gbit/s, 50us", 4, "gossip"]["target_accuracy"] is None
    assert cli.main([*arguments, "--accuracy", "0.4", "--out", str(out)]) == 0
    first = cells(out)["1 Gbit/s, 50us", 4, "gossip"]
    assert first["seconds_to_accuracy"] == pytest.approx(100 * first["step_seconds"])


def test_a_figure_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    figure = tmp_path / "figure.png"
    assert cli.main([*SHORT, "--strategy", "gossip,local", "--figure", str(figure)]) == 0
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "alexnet"], "no profile 'alexnet' (No such file or directory): give one of"),
        (["--strategy", "gossip,stale"], "no strategy 'stale' is modelled: choose among gossip,"),
        (["--world-size", "8,many"], "'many' is no number of ranks: give whole numbers"),
        (["--world-size", "8,"], "--world-size '8,' has an empty part"),
        (["--world-size", "0"], "world size 0 is out of range"),
        (["--world-size", "6", "--topology", "hypercube"], "hypercube needs a world size that is"),
        (["--bandwidth", "1GB"], "'1GB' is no rate: write 100Mbit, 1Gbit or 2.5Gbit"),
        (["--bandwidth", "0Gbit"], "a rate of '0Gbit' moves nothing"),
        (["--latency", "50"], "'50' is no time: write 50us, 1.5ms or 2s"),
        (["--jitter", "10"], "jitter is 10.0: it is the spread of a step's compute"),
        (["--straggler", "0"], "straggler_factor is 0.0"),
        (["--stragglers", "2"], "give --straggler 2 for twice the time"),
        (["--straggler", "2", "--stragglers", "9", "--world-size", "8"], "9 stragglers among 8"),
        (["--stall", "1s"], "stalls need both --stall and --stall-probability"),
        (["--rack-size", "8"], "racks need both --rack-size and --uplink"),
        (
            ["--rack-size", "8", "--uplink", "1Gbit", "--collective", "halving"],
            "all-reduce by halving over shared uplinks is not modelled",
        ),
        (["--accuracy", "0.8"], "--accuracy and --curves-model need --curves"),
        (["--curves", "none.json", "--accuracy", "87"], "0.87 is 87 %"),
        (["--curves", "none.json"], "no curves 'none.json' (No such file or directory)"),
        (["--network", "none.json"], "`gossipgrad probe --out none.json` measures one"),
        (["--network", "none.json", "--latency", "1ms"], "leave out --bandwidth and --latency"),
        (["--figure", "figure.gif"], "--figure figure.gif must end in .png, .svg, .pdf"),
        (["--figure", "nowhere/figure.png"], "there is no folder nowhere"),
        (["--out", "nowhere/figures.json"], "there is no folder nowhere"),
        (["--steps", "0"], "steps is 0: step through 1 or more"),
    ],
)
def test_mistakes_are_one_kind_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["simulate", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("gossipgrad: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_files_that_hold_something_else_are_named(tmp_path, capsys):
    file = tmp_path / "file.json"
    for held, option, message in [
        ("{}", "--network", "not a network"),
        ('{"format": "gossipgrad network", "version": 9}', "--network", "version 9"),
        ('{"format": "gossipgrad network", "version": 1}', "--network", "missing or not as"),
        ("nonsense", "--curves", "is not JSON"),
        ("{}", "--curves", "has no rows of accuracies"),
        ('{"rows": [{"model": "a"}, {"model": "b"}]}', "--curves", "say which one's curves"),
        ('{"rows": [{"strategy": "gossip"}]}', "--curves", "a row is not as expected"),
        (
            '{"rows": [{"strategy": "a", "world_size": 2, "accuracy_by_epoch_mean": [1]}]}',
            "--curves",
            "it does not tell steps_per_epoch",
        ),
    ]:
        file.write_text(held)
        assert cli.main(["simulate", option, str(file)]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert str(file) in err


def test_without_matplotlib_a_figure_is_refused_before_anything_is_computed(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("gossipgrad.cli._simulate_figure.find_spec", lambda name: None)
    assert cli.main(["simulate", "--figure", "figure.png"]) == 2
    assert "pip install 'gossipgrad[plot]'" in capsys.readouterr().err


def test_rates_and_times_are_read_and_written():
    assert [rate_of(text) for text in ("100Mbit", "2.5 Gbit/s", "10Gbps", "5e3bit")] == [
        1e8,
        2.5e9,
        1e10,
        5e3,
    ]
    assert [seconds_of(text) for text in ("50us", "1.5 ms", "2s", "5e2ns")] == [
        5e-5,
        1.5e-3,
        2.0,
        5e-7,
    ]
    for rate in (1e3, 1e8, 2.5e9, 4e10):
        assert rate_of(rate_text(rate)) == rate
    assert [seconds_text(s) for s in (2e-5, 0.25, 59.0, 600.0, 7200.0, 1e6)] == [
        "20 us",
        "250 ms",
        "59 s",
        "10 min",
        "2 h",
        "11.6 d",
    ]


def test_curves_of_virtual_ranks_are_read():
    """The file that `python -m benchmarks.virtual_ranks` has written."""
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "virtual_ranks.json"
    curves = Curves.load(path, model="mlp")
    for strategy in ("gossip", "allreduce", "every-log-p", "local"):
        assert 0.05 < curves.final(strategy, 128) < 0.95
    assert curves.steps_to("allreduce", 128, 0.5) > 0
    assert curves.steps_to("allreduce", 128, 0.99) is None
    assert not curves.knows("gossip", 12345)
