"""A laboratory whose workers answer at once, and a small grid to measure in it."""

from dataclasses import dataclass

from benchmarks.network._cells import Cells
from benchmarks.network._grid import Budget, Grid
from benchmarks.network._group import measure_group
from benchmarks.network._laboratory import WorkerError

BUDGET = Budget(profile="resnet50", time_factor=0.05, size_factor=0.0005)


@dataclass(frozen=True, kw_only=True)
class Few(Grid):
    """A grid with these contestants alone."""

    contestants: tuple[str, ...] = ("exchange", "no communication", "gossip", "ddp")

    def names(self, world_size, rate, budget):
        return self.contestants


GRID = Few(world_sizes=(2,), rates=(1e8, 1e9), budgets=(BUDGET,), blocks=2, block_seconds=0.01)
BREAKS = WorkerError("on rank 1: it broke")


class FakeLaboratory:
    """Workers that answer at once; 1 Gbit/s is refused. `errors` are raised by contestant or order,
    once each if they stand in a list."""

    def __init__(self, **errors):
        self.log = []
        self.plans = {}
        self.spreads = {}
        self.transfer = 0.004
        self.by_others = 0.1
        self.alone = 0.0148
        self.bare_busy = 0.2
        self.errors = errors

    def _may_fail(self, what):
        error = self.errors.get(what)
        if isinstance(error, list):
            error = error.pop() if error else None
        if error is not None:
            raise error

    def refusal(self, world_size, rate):
        return "more than it carries" if rate == 1e9 else None

    def join(self, world_size):
        self.log.append(f"join {world_size}")
        self._may_fail("join")

    def set_rate(self, rate):
        self._may_fail("tried" if rate else "fast")

    def wait_until_quiet(self, patience_seconds):
        pass

    def make(self, name, profile, size_factor):
        self._may_fail("make")
        return 4 * sum(row[1] for row in profile["parameters"])

    def settle(self, name, steps, timeout_seconds):
        return {"seconds": self.transfer, "memory_bytes": 1000}

    def run(self, name, warm_up, steps, timeout_seconds, *, spread_seconds, hurried):
        self._may_fail(name)
        self.spreads[name] = spread_seconds
        self.plans[name] = warm_up, steps
        return {
            "seconds": {"exchange": 0.5, "no communication": self.alone}.get(name, 0.02),
            "steps_run": steps,
            "late_share": 0.0,
            "uneven_share": 0.0,
            "cpu_seconds": 0.01,
            "cpu_busy": {"gossip": 0.8, "exchange": self.bare_busy}.get(name, 0.2),
            "cpu_busy_by_others": self.by_others,
            "bytes_on_wire": 1_000_000,
            "clocks": {"waiting": 0.001} if name == "gossip" else {},
        }

    def leave(self):
        self.log.append("leave")
        self._may_fail("leave")

    def restart(self):
        self.log.append("restart")


def measure(laboratory, path, grid=GRID, *, again=False, **options):
    """Measures what is missing; the cells by contestant and rate, and what was said."""
    said = []
    cells = Cells(path, again=again)
    measure_group(laboratory, 2, BUDGET, grid, cells, say=said.append, **options)
    return {(c["contestant"], c["rate_bits_per_second"]): c for c in cells.cells}, said
