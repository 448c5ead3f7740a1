"""`gossipgrad simulate`."""

import json
import sys
import warnings
from dataclasses import replace

import pytest

from gossipgrad import cli, train
from gossipgrad.planning import AffineCost, PiecewiseCost
from gossipgrad.simulate import STRATEGIES, Network, Racks

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
    assert len(found) == 2 * 2 * len(STRATEGIES)
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
    assert step_seconds("--straggler", "10", "--stragglers", "0") == plain
    assert step_seconds("--stall", "5s", "--stall-probability", "0.2") > plain
    reduce = step_seconds(strategy="allreduce")
    slow = step_seconds("--latency", "10ms", strategy="allreduce")
    halved = step_seconds("--latency", "10ms", "--collective", "halving", strategy="allreduce")
    hops = step_seconds("--latency", "50us", "--hop-latency", "10ms", strategy="allreduce")
    assert hops == pytest.approx(slow)
    plain, hopping = (
        step_seconds("--latency", "50us", *more, strategy="gossip")
        for more in ([], ["--hop-latency", "10ms"])
    )
    assert hopping == plain
    assert reduce < halved < slow


def test_a_measured_network_takes_the_place_of_a_rate(tmp_path, capsys):
    network, out = tmp_path / "network.json", tmp_path / "figures.json"
    fast = AffineCost(alpha_seconds=0.0, beta_seconds_per_byte=0.0)
    slow = AffineCost(alpha_seconds=0.0, beta_seconds_per_byte=1e-7)
    measured = Network(exchange=fast, links={(0, 1): slow}, world_size=4)
    network.write_text(json.dumps(measured.to_json()))
    arguments = ["simulate", "--network", str(network), "--steps", "20", "--strategy", "gossip"]
    arguments += ["--out", str(out), "--world-size"]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert cli.main([*arguments, "4,5,6"]) == 0
    assert "5, 6: costs of single links" in capsys.readouterr().err
    figures = {p: cell for (_, p, _), cell in cells(out).items()}
    assert figures[4]["step_seconds"] > 2 * figures[5]["step_seconds"]  # the slow link is of 4
    assert cli.main([*arguments, "4"]) == 0
    curve = PiecewiseCost(sizes=(0.0, 1e6), seconds=(1e-3, 0.1))
    reduced = replace(measured, links={}, all_reduce=curve)
    network.write_text(json.dumps(reduced.to_json()))
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert cli.main([*arguments, "5"]) == 0
    assert "5: its all-reduce" in capsys.readouterr().err


def test_links_of_no_certain_number_of_ranks_are_kept(tmp_path, capsys):
    """A description written by hand says of whom it is by naming them."""
    network, out = tmp_path / "network.json", tmp_path / "figures.json"
    slow = AffineCost(alpha_seconds=0.0, beta_seconds_per_byte=1e-7)
    links = {(0, 4): slow, (1, 4): slow, (2, 4): slow, (3, 4): slow}
    written = Network(exchange=AffineCost(0.0, 1e-10), links=links)
    network.write_text(json.dumps(written.to_json()))
    arguments = ["simulate", "--network", str(network), "--steps", "20", "--strategy", "gossip"]
    assert cli.main([*arguments, "--world-size", "5", "--out", str(out)]) == 0
    (cell,) = cells(out).values()
    assert cell["step_seconds"] == pytest.approx(102228128 * 1e-7, rel=0.1)
    assert cli.main([*arguments, "--world-size", "4"]) == 2
    assert "the network names rank 4, but there are 4 ranks" in capsys.readouterr().err


def test_payloads_and_wires_are_rows_of_their_own(tmp_path):
    out = tmp_path / "figures.json"
    arguments = [
        *SHORT,
        "--payload",
        "weights,weights+momentum,weights+state,weights+state/4",
        "--out",
        str(out),
    ]
    arguments += ["--profile", "gpt2", "--strategy", "gossip,allreduce,local"]
    assert cli.main([*arguments, "--wire", "float32,bfloat16"]) == 0
    sent = {
        name: cell["bytes_sent_per_step"] for (_, p, name), cell in cells(out).items() if p == 4
    }
    gossips = {name: value / sent["gossip"] for name, value in sent.items() if "gossip" in name}
    assert gossips == {
        "gossip": 1,
        "gossip, bf16": 0.5,
        "gossip, momentum": 2,
        "gossip, momentum, bf16": 1,
        "gossip, state": 3,  # with the two moments of Adam
        "gossip, state, bf16": 1.5,
        "gossip, state every 4": 1.5,
        "gossip, state every 4, bf16": 0.75,
    }
    assert sent["allreduce"] == 2 * sent["allreduce, bf16"]
    assert sent["local"] == 0


def test_a_network_file_keeps_what_its_links_share(tmp_path):
    network, out = tmp_path / "network.json", tmp_path / "figures.json"
    cost = AffineCost(alpha_seconds=0.0, beta_seconds_per_byte=8e-9)
    shared = Network(exchange=cost, racks=Racks(size=2, uplink_bits_per_second=1e8))
    network.write_text(json.dumps(shared.to_json()))
    arguments = ["simulate", "--network", str(network), "--world-size", "4", "--steps", "20"]

    def step_seconds(*options):
        assert cli.main([*arguments, *options, "--strategy", "gossip", "--out", str(out)]) == 0
        return next(iter(cells(out).values()))["step_seconds"]

    assert step_seconds() > 2 * step_seconds("--rack-size", "4", "--uplink", "1Gbit")


def test_a_figure_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    figure = tmp_path / "figure.png"
    assert cli.main([*SHORT, "--strategy", "gossip,local", "--figure", str(figure)]) == 0
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--profile", "alexnet"], "'alexnet'"),
        (["--strategy", "gossip,stale"], "'stale'"),
        (["--world-size", "8,many"], "'many'"),
        (["--world-size", "8,"], "'8,'"),
        (["--world-size", "0"], "world size 0"),
        (["--world-size", "6", "--topology", "hypercube"], "hypercube"),
        (["--bandwidth", "1GB"], "'1GB'"),
        (["--bandwidth", "1e-300bit", "--steps", "5"], "ranks takes more seconds than"),
        (["--bandwidth", "1e400bit"], "'1e400bit'"),
        (["--rack-size", "8", "--uplink", "1e400bit"], "'1e400bit'"),
        (["--latency", "1e400s"], "'1e400s'"),
        (["--payload", "weights+state/0"], "'weights+state/0'"),
        (["--wire", "int8"], "'int8'"),
        (["--bandwidth", "0Gbit"], "'0Gbit'"),
        (["--latency", "50"], "'50'"),
        (["--jitter", "10"], "jitter is 10.0"),
        (["--straggler", "0"], "straggler_factor is 0.0"),
        (["--stragglers", "2"], "--straggler 2"),
        (["--straggler", "2", "--stragglers", "9", "--world-size", "8"], "9 stragglers among 8"),
        (["--stall", "1s"], "--stall-probability"),
        (["--rack-size", "8"], "--uplink"),
        (["--rack-size", "8", "--uplink", "1Gbit", "--collective", "halving"], "halving"),
        (["--network", "none.json"], "gossipgrad probe --out none.json"),
        (["--network", "none.json", "--latency", "1ms"], "--latency"),
        (["--network", "none.json", "--hop-latency", "1ms"], "--hop-latency"),
        (["--hop-latency", "50"], "'50'"),
        (["--figure", "figure.gif"], ".png, .svg, .pdf"),
        (["--figure", "nowhere/figure.png"], "no folder nowhere"),
        (["--out", "nowhere/figures.json"], "no folder nowhere"),
        (["--steps", "0"], "steps is 0"),
    ],
)
def test_mistakes_are_one_kind_line(arguments, named, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["simulate", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("gossipgrad: error: ")
    assert err.count("\n") == 1
    assert named in err


def test_files_that_hold_something_else_are_named(tmp_path, capsys):
    file = tmp_path / "file.json"
    for held, option, message in [
        ("{}", "--network", "not a network"),
        ('{"format": "gossipgrad network", "version": 9}', "--network", "version 9"),
        ('{"format": "gossipgrad network", "version": 1}', "--network", "missing or not as"),
    ]:
        file.write_text(held)
        assert cli.main(["simulate", option, str(file)]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert str(file) in err


def test_without_matplotlib_a_figure_is_refused_before_anything_is_computed(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["simulate", "--figure", "figure.png"]) == 2
    assert "pip install 'gossipgrad[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize("rate", ["1000Mbit", "1 Gbit/s", "1Gbps", "1e9bit"])
@pytest.mark.parametrize("latency", ["50us", ".05 ms", "5e-5s", "5e4ns"])
def test_rates_and_times_are_read_as_people_write_them(rate, latency, tmp_path):
    out = tmp_path / "figures.json"
    arguments = [*SHORT, "--bandwidth", rate, "--latency", latency, "--strategy", "gossip"]
    assert cli.main([*arguments, "--world-size", "4", "--out", str(out)]) == 0
    (cell,) = json.loads(out.read_text())["cells"]
    assert cell["rate_bits_per_second"] == 1e9
    assert cell["network"].startswith("1 Gbit/s, ")


def test_every_strategy_of_the_command_has_a_model():
    assert set(train.STRATEGIES) <= set(STRATEGIES)
