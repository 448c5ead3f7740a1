"""The comparison of predicted with measured cells, on cells that are made up."""

import json
import subprocess

import pytest

from benchmarks import simulate_check
from benchmarks._simulate_check_page import PAGE, fill_page
from benchmarks.netlab import NetlabError
from benchmarks.network import __main__ as network
from benchmarks.network import _kinds as kinds
from benchmarks.network._where import where
from gossipgrad.planning import AffineCost
from gossipgrad.simulate import Network


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks._common.RESULTS", tmp_path)
    monkeypatch.setattr("benchmarks.simulate_check.RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["simulate_check"])
    page = tmp_path / "page.md"
    marks = "<!-- benchmarks.simulate_check -->\n\nno figures yet\n\n<!-- end -->"
    page.write_text(f"Before.\n\n{marks}\n\nAfter.\n")
    monkeypatch.setattr("benchmarks._simulate_check_page.PAGE", page)
    return tmp_path


def cell(contestant, seconds, **others):
    return {
        "contestant": contestant,
        "world_size": 4,
        "rate_bits_per_second": 1e8,
        "profile": "resnet50",
        "time_factor": 1.5,
        "size_factor": 0.045,
        "step_seconds_median": seconds,
        "marked": False,
        **others,
    }


def test_missing_cells_are_told(results, capsys):
    assert simulate_check.main() == 2
    assert "`python -m benchmarks.network` measures the cells" in capsys.readouterr().err


def test_every_measured_cell_that_is_modelled_has_a_row(results, capsys):
    compute = 1.5 * 0.29193
    cells = [cell(name, 1.0) for name in simulate_check.CONTESTANTS]
    cells += [
        cell("no communication", compute),
        cell("ddp, PowerSGD", 1.0),
        cell("bare exchange", 1.0),
        cell("gossip", None, error="it failed", marked=True),
        cell("no communication", compute / 2, marked=True, rate_bits_per_second=1e9),
    ]
    (results / "network.json").write_text(json.dumps(cells))
    slow = Network(exchange=AffineCost(alpha_seconds=0.0, beta_seconds_per_byte=1e-6), world_size=4)
    probes = [slow.to_json() | {"rate_bits_per_second": 1e8}]
    (results / "network_probes.json").write_text(json.dumps({"probes": probes}))
    assert simulate_check.main() == 0
    written = json.loads((results / "simulate_check.json").read_text())
    assert written["not_modelled"] == ["ddp, PowerSGD"]
    assert "not modelled: ddp, PowerSGD\n" in capsys.readouterr().out
    page = (results / "page.md").read_text()
    assert page.startswith("Before.\n\n")
    assert page.endswith("\n\n<!-- end -->\n\nAfter.\n")
    assert "no figures yet" not in page
    text = " ".join(page.split())
    assert "Measured there and not modelled: `ddp, PowerSGD`." in text
    assert "Where a `-` stands, at 4 hosts at 1000 Mbit/s, no probe came about" in text
    assert "a message is taken to start up in 0.2 ms, and a hop of Gloo's ring in 0.9 ms. " in text
    assert "was chosen among 0.2, 0.9 and 1 ms by these very cells" in text
    # Measured, from the rate, from a probe, where there was one; the marked one counts for nothing.
    head = "| resnet50 (times x 1.5, sizes x 0.045), 1000 Mbit/s | 4 hosts |"
    assert f"{head}\n|---|---|\n" in page
    assert "| no communication | 219\\* / **438** / - |" in page
    told = written["summary"]["from_rate"]
    assert f"of the links alone: {told['within_goal']} of {told['cells']} step times are" in text
    rows = written["rows"]
    assert len(rows) == len(simulate_check.CONTESTANTS) + 2
    alone = [row for row in rows if row["contestant"] == "no communication"]
    assert alone[1]["from_rate_error"] == pytest.approx(0, abs=1e-3)
    assert alone[2]["from_rate_error"] == pytest.approx(1, abs=1e-3)
    assert alone[2]["from_probe_error"] is None  # no probe at that rate
    summary = written["summary"]["from_rate"]
    assert summary["cells"] == len(rows) - 1  # the marked one claims nothing
    by_name = {row["contestant"]: row for row in rows if not row["marked"]}
    # 4.6 MB in 1 us a byte are 4.6 s, where all else is hidden.
    assert by_name["gossip"]["from_probe_seconds"] == pytest.approx(4.6, rel=0.01)
    halved = by_name["gossip, bf16 wire"]["from_probe_seconds"]
    assert halved == pytest.approx(2.3, rel=0.01)
    assert by_name["gossip, sync"]["from_rate_seconds"] > by_name["gossip"]["from_rate_seconds"]
    assert by_name["ddp"]["from_probe_seconds"] > 1.5 * by_name["gossip"]["from_probe_seconds"]
    # gossip keeps its buckets of 4 MiB: 4.6 MB are two messages, the last is mixed after the rest.
    assert by_name["gossip, state"]["from_probe_seconds"] == pytest.approx(9.2, rel=0.01)
    assert by_name["gossip, state every 4"]["from_probe_seconds"] == pytest.approx(5.75, rel=0.01)


def test_the_page_is_what_was_measured(tmp_path):
    figures = json.loads((simulate_check.RESULTS / "simulate_check.json").read_text())
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    fill_page(figures, page)
    assert page.read_text() == PAGE.read_text(), "run python -m benchmarks.simulate_check"
    page.write_text("No marks.\n")
    with pytest.raises(ValueError, match=r"page\.md has no '<!-- benchmarks\.simulate_check -->'"):
        fill_page(figures, page)


def test_contestants_are_modelled_with_the_buckets_of_the_grid():
    small = cell("", 1.0)
    assert simulate_check.CONTESTANTS["gossip"](small).bucket_bytes == 4 << 20
    ddp = simulate_check.CONTESTANTS["ddp"](small)
    assert ddp.first_bucket_bytes == round(0.045 * 2**20)
    assert ddp.bucket_bytes == round(0.045 * 25 * 2**20)
    # A hop of a ring starts up later than a message of gossip's.
    network = simulate_check.from_rate(small)
    assert network.all_reduce_seconds(0, 4) == pytest.approx(6 * 9e-4)
    assert network.exchange(0) == pytest.approx(2e-4)
    modelled = simulate_check.CONTESTANTS.keys() | {"ddp, PowerSGD", "gossip, sync, in backward"}
    assert modelled == kinds.CONTESTANTS.keys()


def test_probes_are_taken_where_something_was_measured_on_one_network(monkeypatch, capsys):
    asked = []

    class Fake:
        def __init__(self, hosts):
            asked.append(hosts)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def shape(self, hosts, rate):
            asked.append((hosts, rate))
            if hosts == 8:
                raise NetlabError("not so much")

        def environment(self, host, port):
            return {"RANK": str(host), "WORLD_SIZE": "8", "MASTER_PORT": str(port)}

        def popen(self, host, command, *, env, **options):
            assert env["WORLD_SIZE"] == "2"
            out = command[command.index("--out") + 1]
            fails = "echo no such link >&2; exit 2" if asked[-1][1] == 2e8 and host else ""
            says = f"echo '{{}}' > {out}; {fails}"
            return subprocess.Popen(["sh", "-c", says], env=env, **options)

    monkeypatch.setattr(simulate_check, "Shaped", Fake)
    cells = [cell("gossip", 1.0, world_size=p) for p in (8, 2, 2)]
    cells.append(cell("gossip", 1.0, world_size=2, rate_bits_per_second=2e8))
    cells.append(cell("gossip", None, world_size=16))
    found = simulate_check.take_probes(simulate_check.places(cells))
    assert found == [{"rate_bits_per_second": 1e8, "where": where()}]
    assert asked == [8, (2, 1e8), (2, 2e8), (8, 1e8)]
    out = capsys.readouterr().out
    assert "no probe of 8 hosts at 100 Mbit/s: not so much" in out
    assert "no probe of 2 hosts at 200 Mbit/s: host 1 ended with 2: no such link" in out


def test_where_no_laboratory_is_one_line_says_so(tmp_path, monkeypatch, capsys):
    def refused(hosts):
        raise NetlabError("run it as root")

    monkeypatch.setattr(simulate_check, "RESULTS", tmp_path)
    monkeypatch.setattr("benchmarks._common.RESULTS", tmp_path)
    monkeypatch.setattr(simulate_check, "Shaped", refused)
    path = tmp_path / "cells.json"
    path.write_text(json.dumps([cell("gossip", 1.0)]))
    monkeypatch.setattr("sys.argv", ["simulate_check", "--probe", "--cells", str(path)])
    assert simulate_check.main() == 2
    assert capsys.readouterr().err == "no laboratory here: run it as root\n"
    assert [one.name for one in tmp_path.iterdir()] == ["cells.json"]


def probe(world_size, rate, alpha_seconds=0.0):
    cost = AffineCost(alpha_seconds=alpha_seconds, beta_seconds_per_byte=1e-6)
    network = Network(exchange=cost, world_size=world_size)
    return network.to_json() | {"rate_bits_per_second": rate}


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["simulate_check", *map(str, arguments)])
    return simulate_check.main()


def test_what_comes_out_of_others_files_is_written_beside_them(results, monkeypatch):
    for name in ("network", "other"):
        (results / f"{name}.json").write_text(json.dumps([cell("gossip", 1.0)]))
    for name in ("network_probes", "mine"):
        (results / f"{name}.json").write_text(json.dumps({"probes": [probe(4, 1e8)]}))
    page = (results / "page.md").read_text()
    assert run(monkeypatch, "--cells", results / "other.json") == 0
    assert run(monkeypatch, "--probes", results / "mine.json") == 0
    assert not (results / "simulate_check.json").exists()
    assert (results / "page.md").read_text() == page
    (alone,), (probed,) = (
        json.loads((results / f"{name}_simulate_check.json").read_text())["rows"]
        for name in ("other", "mine")
    )
    assert alone["from_probe_seconds"] is None  # other_probes.json is not there
    assert probed["from_probe_seconds"] == pytest.approx(4.6, rel=0.01)
    assert run(monkeypatch) == 0
    assert (results / "simulate_check.json").exists()
    assert (results / "page.md").read_text() != page


def test_probes_that_were_taken_are_read_and_those_of_other_places_stay(
    results, monkeypatch, capsys
):
    places = [(4, 1e8), (8, 1e8)]
    cells = [cell("gossip", 1.0, world_size=p, rate_bits_per_second=r) for p, r in places]
    (results / "mine.json").write_text(json.dumps(cells))
    held = [probe(*place) for place in (*places, (16, 1e9))]
    path = results / "mine_probes.json"
    path.write_text(json.dumps({"probes": held}))
    taken = [probe(4, 1e8, alpha_seconds=3.0)]
    monkeypatch.setattr(simulate_check, "take_probes", lambda asked: taken)
    assert run(monkeypatch, "--probe", "--cells", results / "mine.json") == 0
    written = json.loads(path.read_text())
    assert written["command"].startswith("python -m benchmarks.simulate_check --probe --cells ")
    assert written["probes"] == [*taken, *held[1:]]
    assert "the probe of before stays: 8 hosts at 100 Mbit/s\n" in capsys.readouterr().out
    rows = json.loads((results / "mine_simulate_check.json").read_text())["rows"]
    assert rows[0]["from_probe_seconds"] > 3.0 + rows[1]["from_probe_seconds"] - 0.1
    taken.clear()  # nothing came about: the file is left alone
    before = path.read_text()
    assert run(monkeypatch, "--probe", "--cells", results / "mine.json") == 0
    assert path.read_text() == before


def test_cells_of_two_scales_have_tables_of_their_own(results, monkeypatch):
    scales = [{"size_factor": 0.03, "time_factor": 3.0}, {"size_factor": 0.15, "time_factor": 3.0}]
    cells = [cell("gossip", s, **scale) for s, scale in zip((0.889, 5.0), scales, strict=True)]
    (results / "network.json").write_text(json.dumps(cells))
    assert run(monkeypatch) == 0
    page = (results / "page.md").read_text()
    for size, measured in ((0.03, 889), (0.15, 5000)):
        head = f"| resnet50 (times x 3, sizes x {size}), 100 Mbit/s | 4 hosts |\n|---|---|\n"
        assert f"{head}| gossip | {measured} / " in page


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("not json", "Expecting value"),
        ("{}", "no list"),
        ('[{"a": 1}]', "entry 0 lacks 'contestant'"),
        ("[3]", "entry 0 lacks 'contestant'"),
    ],
)
def test_files_of_something_else_are_refused_in_one_line(
    results, monkeypatch, capsys, content, why
):
    path = results / "network.json"
    path.write_text(content)
    for main, arguments in (
        (simulate_check.main, ["--cells", str(path)]),
        (network.main, ["--page", "--out", str(path)]),
        (network.main, ["--out", str(path)]),
    ):
        monkeypatch.setattr("sys.argv", ["bench", *arguments])
        assert main() == 2
        said = capsys.readouterr().err
        assert said.startswith(f"{path} holds no cells of `python -m benchmarks.network`: {why}")
        assert said.count("\n") == 1
    assert path.read_text() == content
    path.write_text(json.dumps([cell("gossip", 1.0)]))
    probes = results / "network_probes.json"
    probes.write_text(content)
    assert run(monkeypatch) == 2
    assert capsys.readouterr().err.startswith(f"{probes} holds no probes of `python -m bench")
    assert run(monkeypatch, "--probes", results / "none.json") == 2
    assert capsys.readouterr().err == f"no {results / 'none.json'}: --probe takes the probes\n"
