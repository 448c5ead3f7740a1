"""The comparison's book-keeping: which cells are measured, what they hold, and a few for real."""

import json
import os
import signal
import tempfile
from dataclasses import replace

import pytest

from benchmarks._common import RESULTS
from benchmarks._ends import ends_as_ctrl_c
from benchmarks.netlab import NetlabError
from benchmarks.network import __main__ as bench
from benchmarks.network._cells import Cells, _alone
from benchmarks.network._group import compared
from benchmarks.network._hosts import Loopback
from benchmarks.network._kinds import ALONE, BARE, CONTESTANTS, label
from benchmarks.network._laboratory import Laboratory, WorkerError
from benchmarks.network._marks import marks_of
from benchmarks.network._table import print_table
from support.laboratory import BREAKS, BUDGET, GRID, FakeLaboratory, measure


def test_figures_failures_and_refusals(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path, laboratory = tmp_path / "network.json", FakeLaboratory(ddp=BREAKS)
    cells, said = measure(laboratory, path)
    assert laboratory.log == ["join 2", "restart", "join 2", "leave"]
    assert said[0] == "p = 2, 1000 Mbit/s: more than it carries"
    assert said[1] == "p = 2, resnet50: 4 contestants made in 0 s"
    assert said[2] == "ddp failed: on rank 1: it broke"
    written = json.loads(path.read_text())
    assert len(written) == len(cells) == 5
    assert len({frozenset(cell) for cell in written}) == 1  # the same keys in each
    failed, refused = cells["ddp", 1e8], cells["any", 1e9]
    assert (failed["error"], refused["error"]) == ("on rank 1: it broke", "more than it carries")
    for cell in (failed, refused):
        assert cell["marked"]
        assert cell["step_seconds_median"] is None
    gossip, alone = cells["gossip", 1e8], cells["no communication", 1e8]
    assert gossip["marks"] == ["CPUs 80 % busy"]
    assert not alone["marked"]
    assert gossip["exchange_bound_seconds"] == gossip["bare_seconds"] == 0.5
    assert gossip["bound_seconds"] == 0.08  # bytes / rate
    assert gossip["exposed_seconds"] == pytest.approx(0.0052)
    assert (gossip["warm_up_steps"], gossip["steps_per_block"]) == laboratory.plans["gossip"]
    assert gossip["steps_per_block"] == 2
    spread = pytest.approx(0.1 * gossip["compute_seconds"], rel=1e-3)
    assert laboratory.spreads == {"exchange": 0, "no communication": spread, "gossip": spread}
    assert gossip["memory_bytes"] == 1000
    assert set(gossip["where"]) == {"machine", "date", "commit"}
    assert alone["exchange_bound_seconds"] == alone["compute_seconds"]
    assert alone["efficiency"] == pytest.approx(0.9863, abs=1e-3)
    bare = cells["bare exchange", 1e8]
    assert bare["compute_seconds"] == 0
    assert bare["efficiency"] is bare["exposed_seconds"] is bare["exchange_bound_seconds"] is None
    assert cells["bare exchange", 1e8]["steps_per_block"] == 3  # of 4 ms, for 10
    print_table(written)
    out = capsys.readouterr().out
    assert "20 (20..20) 73 % 0.04x*" in out
    assert "it broke" in out
    assert "What gossip sends" not in out


def test_nothing_is_claimed_that_no_bare_transfer_was_measured_for(tmp_path, capsys):
    names = ("exchange", "no communication", "gossip", "ddp", "ddp, PowerSGD")
    grid = replace(GRID, rates=(1e8,), contestants=(*names, "local SGD, period 8"))
    cells, _ = measure(FakeLaboratory(), tmp_path / "network.json", grid)
    for name in names[3:] + grid.contestants[-1:]:  # of all-reduce there is no bare cell here
        cell = cells[name, 1e8]
        assert cell["exchange_bound_seconds"] is None
        assert cell["efficiency"] == pytest.approx(cell["compute_seconds"] / 0.02, rel=1e-3)
        assert cell["exposed_seconds"] == pytest.approx(0.0052)
    print_table(list(cells.values()))
    told = capsys.readouterr().out.splitlines()
    texts = {line[2:].split("  ")[0]: line.split("│")[-2].strip() for line in told if "│" in line}
    assert texts["ddp, PowerSGD"] == "20 (20..20) 73 %"
    assert texts["bare exchange"] == "500 (500..500)"


def test_published_cells_say_what_is_derived_from_their_figures():
    cells = json.loads((RESULTS / "network.json").read_text())
    names = {label(name): name for name in (*BARE, *CONTESTANTS)}
    place = ("profile", "time_factor", "size_factor", "world_size", "rate_bits_per_second")
    alone = {
        tuple(cell[key] for key in place): cell["step_seconds_median"]
        for cell in cells
        if cell["contestant"] == ALONE
    }
    for cell in cells:
        if cell["error"] is not None:
            continue
        figures = (cell["step_seconds_median"], cell["compute_seconds"])
        there = tuple(cell[key] for key in place)
        found = compared(
            names[cell["contestant"]], *figures, alone.get(there), cell["bare_seconds"]
        )
        for what, value in found.items():
            if value is None:
                assert cell[what] is None, (what, cell)
            else:
                assert cell[what] == pytest.approx(value, abs=2e-4), (what, cell)


def test_blocks_are_as_their_transfers_allow(tmp_path):
    hidden, exposed = FakeLaboratory(), FakeLaboratory()
    exposed.transfer = 0.02  # the compute is 0.0146
    for laboratory in (hidden, exposed):
        measure(laboratory, tmp_path / f"{laboratory.transfer}.json")
    assert hidden.plans["gossip"] == (1, 2)
    assert exposed.plans["gossip"] == (2, 2)
    assert exposed.spreads["gossip"] == 0  # they wait for each other
    assert exposed.spreads["no communication"] == hidden.spreads["gossip"] > 0
    assert hidden.spreads["ddp"] == 0


def test_bytes_are_counted_over_whole_periods(tmp_path):
    """One round in four carries state, whichever round a block begins with."""
    for transfer in (0.004, 0.02):
        laboratory = FakeLaboratory()
        laboratory.transfer = transfer
        names = ("exchange, state every 4", "no communication", "gossip, state every 4")
        seldom = replace(GRID, rates=(1e8,), contestants=(*names, "local SGD, period 8"))
        measure(laboratory, tmp_path / f"{transfer}.json", seldom)
        assert laboratory.plans["gossip, state every 4"] == (4, 4)
        assert laboratory.plans["exchange, state every 4"] == (0, 4)
        assert laboratory.plans["local SGD, period 8"] == (0, 8)
        assert laboratory.plans["no communication"] == (0, 1)


def test_what_is_missing_is_measured_and_nothing_else(tmp_path):
    path = tmp_path / "network.json"
    measure(FakeLaboratory(gossip=BREAKS), path)
    mended = FakeLaboratory()
    _, said = measure(mended, path)  # it failed: once more, with what it is compared with
    assert mended.plans.keys() == {"exchange", "no communication", "gossip"}
    assert said[1] == "p = 2, resnet50: 3 contestants made in 0 s"
    nothing = FakeLaboratory()
    cells, _ = measure(nothing, path)
    assert nothing.log == []
    assert len(cells) == 5
    nothing.refusal = lambda world_size, rate: None
    cells, _ = measure(nothing, path)  # what was refused may be carried later
    assert nothing.log == ["join 2", "leave"]
    assert len(cells) == 8
    assert ("any", 1e9) not in cells
    more, _ = measure(FakeLaboratory(), path, replace(GRID, blocks=3, rates=(1e8,)))
    assert [len(more[name, 1e8]["step_seconds"]) for name in ("gossip", "ddp")] == [3, 3]
    foreign = json.loads(path.read_text())
    for cell in foreign:
        cell["where"] = {"machine": "another"}
    path.write_text(json.dumps(foreign))
    anew = FakeLaboratory()
    measure(anew, path)
    assert len(anew.plans) == 4


def test_again_keeps_what_it_does_not_measure(tmp_path):
    path = tmp_path / "network.json"
    measure(FakeLaboratory(), path, replace(GRID, rates=(1e8, 3e8)))
    again = FakeLaboratory(join=[WorkerError("worker 1 ended with -9: no word")])
    cells, _ = measure(again, path, replace(GRID, rates=(1e8,)), again=True)
    assert again.log == ["join 2", "restart", "join 2", "leave"]
    assert len(cells) == 8


def test_two_grids_on_one_file_keep_each_others_cells(tmp_path, monkeypatch):
    path = tmp_path / "network.json"
    one, other = Cells(path), Cells(path)
    here, there = (
        list(
            measure(FakeLaboratory(), tmp_path / f"{rate}.json", replace(GRID, rates=(rate,)))[
                0
            ].values()
        )
        for rate in (1e8, 3e8)
    )
    one.put(here[:2])
    other.put(there)
    one.put(here[2:])
    assert json.loads(path.read_text()) == one.cells
    assert len(one.cells) == 8
    other.put([there[0] | {"error": "it broke"}])
    assert [cell["error"] for cell in other.cells].count(None) == 7
    path.unlink()  # by hand: what is known is written again
    one.put(here[:1])
    assert len(json.loads(path.read_text())) == 8
    monkeypatch.setattr("benchmarks.network._cells._LOCK_SECONDS", 0.05)
    with _alone(tmp_path), pytest.warns(UserWarning, match=r"has held the lock of .* for 0.05 s"):
        one.put(here[:1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_polite_end_leaves_the_blocks(tmp_path, monkeypatch, capsys, number):
    left = []

    class Block:
        def __init__(self, *_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, kind, *_):
            left.append(kind)

    monkeypatch.setattr(bench, "Shaped", Block)
    monkeypatch.setattr(bench, "Laboratory", Block)
    monkeypatch.setattr(bench, "measure_group", lambda *_, **__: os.kill(os.getpid(), number))
    monkeypatch.setattr("sys.argv", ["network", "--out", str(tmp_path / "network.json")])
    before = signal.signal(number, signal.SIG_DFL)  # the tests themselves may run under nohup
    try:
        assert bench.main() == 130
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert left == [KeyboardInterrupt] * 2
    assert capsys.readouterr().err.endswith("\nstopped; the same command goes on from here\n")


def test_a_hang_up_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with ends_as_ctrl_c():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_cells_that_nobody_can_check_out_are_told(tmp_path, monkeypatch, capsys):
    def refused(hosts):
        raise NetlabError("run it as root")

    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setattr(bench, "Shaped", refused)
    for commit, out, told in (
        ("1a15e407a3-dirty", "network.json", True),
        ("1a15e407a3", "network.json", False),
        ("1a15e407a3-dirty", "elsewhere/network.json", False),
        (None, "network.json", False),
    ):
        monkeypatch.setattr(bench, "where", lambda commit=commit: {"commit": commit})
        (tmp_path / out).parent.mkdir(exist_ok=True)
        monkeypatch.setattr("sys.argv", ["network", "--out", str(tmp_path / out)])
        assert bench.main() == 2
        said = "the cells will name 1a15e407a3-dirty, a tree that nobody can check out"
        assert (said in capsys.readouterr().err) is told


def test_a_machine_that_others_use_is_marked_and_measured_anew(tmp_path):
    path, busy = tmp_path / "network.json", FakeLaboratory()
    busy.by_others = 0.25
    cells, _ = measure(busy, path)
    assert cells["ddp", 1e8]["marks"] == ["CPUs 25 % taken by other programs"]
    quiet = FakeLaboratory()
    assert not measure(quiet, path)[0]["ddp", 1e8]["marked"]
    assert len(quiet.plans) == 4


def test_a_replay_that_takes_too_long_marks_the_place_and_a_marked_transfer_its_bounds(tmp_path):
    slow = FakeLaboratory()
    slow.alone = 0.0148 * 1.2
    cells, _ = measure(slow, tmp_path / "slow.json")
    said = ["the replay alone takes 22 % too long"]
    assert cells["ddp", 1e8]["marks"] == cells["no communication", 1e8]["marks"] == said
    assert cells["bare exchange", 1e8]["marks"] == []
    busy = FakeLaboratory()
    busy.bare_busy = 0.9
    cells, _ = measure(busy, tmp_path / "busy.json")
    assert cells["gossip", 1e8]["marks"][-1] == "its bound is marked: CPUs 90 % busy"
    assert cells["ddp", 1e8]["marks"] == []  # its transfer is another


@pytest.mark.parametrize("order", ["join", "leave", "make"])
def test_workers_that_end_between_blocks_are_started_anew_a_few_times(tmp_path, order):
    died = WorkerError("worker 1 ended with -9: no word")
    once = FakeLaboratory(**{order: [died]})
    cells, _ = measure(once, tmp_path / "once.json")
    assert once.log.count("restart") == 1
    if order != "make":  # then it is one contestant's
        assert all(cell["error"] is None for (name, _), cell in cells.items() if name != "any")
        always = FakeLaboratory(**{order: died})
        cells, said = measure(always, tmp_path / "always.json")
        if order == "join":
            assert always.log == ["join 2", "restart"] * 3
            assert cells["gossip", 1e8]["error"] == str(died)
            assert said[-1] == f"the workers are started anew: {died}"


def test_links_that_do_not_keep_to_their_rate_are_not_measured_on(tmp_path):
    off = FakeLaboratory(tried=NetlabError("2 links are off their rate"))
    cells, _ = measure(off, tmp_path / "network.json")
    assert off.plans == {}
    assert cells["gossip", 1e8]["error"] == "2 links are off their rate"
    late, said = measure(FakeLaboratory(), tmp_path / "late.json", is_late=lambda: True)
    assert late.keys() == {("any", 1e9)}
    assert len(said) == 1


def test_the_time_is_held_in_the_middle_of_a_rate(tmp_path):
    """What is done stays; the rate that is not is begun anew next time."""
    laboratory, path = FakeLaboratory(), tmp_path / "network.json"
    runs = laboratory.run
    turns = []

    def run(name, *arguments, **options):
        turns.append(name)
        return runs(name, *arguments, **options)

    laboratory.run = run
    grid = replace(GRID, rates=(1e8, 3e8))
    cells, said = measure(laboratory, path, grid, is_late=lambda: len(turns) >= 12)
    assert len(turns) == 12  # two turns of the first rate, one of the second
    assert {rate for _, rate in cells} == {1e8}
    assert said[-1] == "p = 2, 300 Mbit/s: stopped after 1 of 2 turns, which are not kept"
    cells, _ = measure(FakeLaboratory(), path, grid)
    assert len(cells) == 8


def test_no_time_at_all_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["network", "--minutes", "0"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "--minutes 0: leave it out for no limit" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.process
def test_a_cell_of_two_processes_on_loopback(tmp_path, tmp_path_factory, monkeypatch):
    scratch = tmp_path_factory.mktemp("t")  # a socket's path is to be short
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    names = ("exchange", "exchange, state", "no communication", "gossip", "gossip, state", "ddp")
    grid = replace(GRID, rates=(1e8,), contestants=(*names, "local SGD, period 8"), hurried=True)
    with Laboratory(Loopback(), 2) as laboratory:
        assert list(scratch.iterdir()) == []  # so nothing stays, whatever ends this process
        cells, _ = measure(laboratory, tmp_path / "network.json", grid)
        laboratory.join(2)
        with pytest.raises(WorkerError, match=r"^on rank \d: KeyError: 'nobody'"):
            laboratory.make("nobody", BUDGET.scaled().to_json(), 1.0)
        laboratory._workers[1].kill()
        laboratory._workers[1].wait()
        with pytest.raises(WorkerError, match=r"^leave: worker 1 ended with -9: no word"):
            laboratory.leave()
    cells = {name: cell for (name, _), cell in cells.items()}
    assert len(cells) == 7
    for name in names[2:]:
        cell = cells[name]
        assert cell["error"] is None, cell["error"]
        assert cell["compute_seconds"] == pytest.approx(0.0146, rel=0.01)
        assert cell["step_seconds_median"] >= cell["compute_seconds"] * 0.999
        assert cell["cpu_seconds"] > 0
        assert cell["memory_bytes"] >= 0
    assert cells["gossip"]["bare_seconds"] == cells["bare exchange"]["step_seconds_median"] > 0
    assert cells["gossip, state"]["bare"] == "exchange, state"
    local = cells["local SGD, period 8"]
    assert local["steps_per_block"] == 2
    assert local["step_seconds_median"] >= local["compute_seconds"] * 0.999


def test_marks():
    calm = {
        "cpu_busy": 0.5,
        "cpu_busy_by_others": 0.1,
        "late_share": 0.01,
        "uneven_share": 0.01,
        "compute_seconds": 0.4,
    }
    assert marks_of(calm, 0.41, None) == []
    assert marks_of(calm | {"cpu_busy": 0.71}) == ["CPUs 71 % busy"]
    assert marks_of(calm | {"cpu_busy_by_others": 0.21}) == ["CPUs 21 % taken by other programs"]
    assert marks_of(calm | {"late_share": 0.06}) == ["emulated compute 6 % late"]
    assert marks_of(calm | {"uneven_share": 0.3}) == ["the last rank began 30 % late"]
    assert marks_of(calm, 0.43) == ["the replay alone takes 7 % too long"]
    bare = {"marks": ["CPUs 90 % busy"], "step_seconds_median": 0.39}
    assert marks_of(calm, 0.4, bare) == []  # the compute is longer
    assert marks_of(calm | {"compute_seconds": 0.38}, 0.38, bare) == [
        "its bound is marked: CPUs 90 % busy"
    ]
