"""Names of the files in the folder of a run."""

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path

from gossipgrad import checkpoint

_METRICS = re.compile(r"metrics-rank(\d+)\.jsonl")
# All that a run leaves in its folder, but for its lock and its checkpoints.
_FILES = re.compile(
    r"""(config|summary)\.json(\.partial)?
    | (model|best)\.safetensors(\.partial)? | trace\.json | report\.html
    | invitation\.(json|partial)
    | (former/)?metrics-rank\d+(-\d+)?\.jsonl
    | errors-(rank|join)\d+\.txt
    | evicted-rank\d+(-\d+)?\.safetensors
    | tensorboard/rank\d+/events\.out\.tfevents\.[^/]+
    | partial/(opened|resumes|(result|joined|model|trace|lives)-rank\d+(\.\w+)+)""",
    re.VERBOSE,
)


class RunDir:
    """The folder of one run and what lies where in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.summary = path / "summary.json"
        self.model = path / "model.safetensors"
        self.best = path / "best.safetensors"
        self.trace = path / "trace.json"
        self.report = path / "report.html"
        self.checkpoints = path / "checkpoints"
        self.invitation = path / "invitation.json"
        self.lock = path / ".lock"
        self.partial = path / "partial"
        # By it ranks of other machines see whether theirs is the same folder.
        self.opened = self.partial / "opened"
        # There from when a run is resumed until its ranks have what they continue from.
        self.resumes = self.partial / "resumes"

    def metrics(self, rank: int) -> Path:
        """Metrics of a rank, one JSON object a line."""
        return self.path / f"metrics-rank{rank}.jsonl"

    def metrics_ranks(self) -> list[int]:
        """The ranks that have written metrics, in order."""
        names = [_METRICS.fullmatch(path.name) for path in self.path.glob("metrics-rank*.jsonl")]
        return sorted(int(name[1]) for name in names if name is not None)

    def errors(self, rank: int) -> Path:
        """Traceback of a rank that failed."""
        return self.path / f"errors-rank{rank}.txt"

    def evicted_model(self, rank: int) -> Path:
        """Free for the weights of a rank that the others had given up while it hung."""
        return free(self.path / f"evicted-rank{rank}.safetensors")

    def former_metrics(self, rank: int) -> Path:
        """Free for what a rank wrote that the run has gone on without."""
        return free(self.path / "former" / self.metrics(rank).name)

    def tensorboard(self, rank: int) -> Path:
        """TensorBoard event files of a rank."""
        return self.path / "tensorboard" / f"rank{rank}"

    def join_errors(self, number: int) -> Path:
        """Traceback of a worker that could not join, by the id of its process."""
        return self.path / f"errors-join{number}.txt"

    def rank_result(self, rank: int) -> Path:
        """What a rank hands in, where it has no launcher that all hear."""
        return self.partial / f"result-rank{rank}.json"

    def rank_lock(self, rank: int) -> Path:
        """Locked by a rank for as long as it lives."""
        return self.partial / f"lives-rank{rank}.lock"

    def rank_joined(self, rank: int) -> Path:
        """How a rank came in that joined the run."""
        return self.partial / f"joined-rank{rank}.json"

    def rank_model(self, rank: int) -> Path:
        """What a rank has for export."""
        return self.partial / f"model-rank{rank}.safetensors"

    def rank_trace(self, rank: int) -> Path:
        """Spans of a rank."""
        return self.partial / f"trace-rank{rank}.jsonl"

    @property
    def holds_run(self) -> bool:
        """Whether there is something to lose: a run under way, or what one has reached.

        Options and tracebacks alone are left by a start that failed.
        """
        reached = [self.summary, self.model]
        for pattern in ("metrics-rank*.jsonl", "evicted-rank*.safetensors"):
            reached += self.path.glob(pattern)
        return (
            (self.partial.exists() and self.config.exists())
            or self.holds_checkpoints
            or any(file.exists() and file.stat().st_size for file in reached)
        )

    @property
    def is_complete(self) -> bool:
        """Whether the run has reached an end, and does not go on from there."""
        return self.summary.exists() and not self.resumes.exists()

    @property
    def holds_checkpoints(self) -> bool:
        """Whether there are checkpoints, of a run of the command or of a loop of the user's own."""
        return any(self.checkpoints.glob("step-*"))

    @property
    def is_run(self) -> bool:
        """Whether the folder is that of a run: `config.json` is one that the command wrote."""
        with contextlib.suppress(OSError, ValueError):
            content = json.loads(self.config.read_text())
            return isinstance(content, dict) and {"strategy", "versions"} <= content.keys()
        return False

    def files(self) -> list[Path]:
        """What is there under a name that a run gives its files."""
        found = (
            path
            for pattern in ("*", "former/*", "partial/*", "tensorboard/*/*")
            for path in self.path.glob(pattern)
        )
        return [path for path in found if _FILES.fullmatch(path.relative_to(self.path).as_posix())]

    def check_replaceable(self) -> None:
        """Raise `ValueError` if a run would remove or replace what no run has left there."""
        not_a_runs = {*self.partial.glob("*")} - {*self.files()}
        if not self.is_run:
            not_a_runs |= {*self.files(), *self.checkpoints.glob("step-*")}
        if not_a_runs:
            raise ValueError(
                f"a run in {self.path} would replace {min(not_a_runs)}, which is no file of a run "
                f"that {self.config.name} is of: name another folder with --out, or move that file "
                "away. Nothing was removed."
            )

    def remove_partial(self) -> None:
        """Remove what ranks left to be put together, and invite nobody any more."""
        with contextlib.suppress(OSError):
            self.invitation.unlink()
        for file in self.files():
            if file.parent == self.partial:
                with contextlib.suppress(OSError):
                    file.unlink()
        with contextlib.suppress(OSError):  # where somebody else keeps something there, it stays
            self.partial.rmdir()

    def clear(self) -> None:
        """Remove the files of an earlier run, and those alone; not the lock of who does this."""
        self.remove_partial()
        checkpoint.remove_all(self.checkpoints)
        with contextlib.suppress(OSError):  # the same
            self.checkpoints.rmdir()
        for file in self.files():
            file.unlink()

    def reopen(self) -> None:
        """Make room for a run to go on; what its last end has left stays until that is sure."""
        self.remove_partial()
        for file in self.files():
            if file.name.startswith("errors-"):
                file.unlink()
        self.partial.mkdir(exist_ok=True)
        self.resumes.touch()

    def remove_end(self) -> None:
        """Remove what an end has put together, of a run that goes on."""
        for file in (self.summary, self.model, self.trace, self.report):
            file.unlink(missing_ok=True)


def claim(
    out: Path | None,
    *,
    name: str,
    overwrite: bool,
    hold: Callable[[RunDir], None] = lambda run_dir: None,
) -> RunDir:
    """Make the folder of a run, or the next free `runs/NAME-N` when `out` is None."""
    try:
        if out is None:
            number = 1
            while True:
                folder = RunDir(Path("runs") / f"{name}-{number}")
                try:
                    folder.path.mkdir(parents=True)
                    hold(folder)
                    break
                except FileExistsError:
                    number += 1
        else:
            folder = RunDir(out)
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.check_replaceable()
            if not overwrite and folder.holds_run:
                goes_on = f"go on with it by --resume {out}, " if folder.holds_checkpoints else ""
                raise ValueError(
                    f"{out} holds a run already; {goes_on}name another folder with --out, or "
                    "replace it with --overwrite."
                )
            hold(folder)
            if folder.is_run:
                folder.clear()
        folder.partial.mkdir(exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"cannot write to {error.filename}: {error.strerror}; name another folder with --out."
        ) from error
    return folder


def free(path: Path) -> Path:
    """The path, or, where that is taken, the first of NAME-2, NAME-3 and so on that is not."""
    found, number = path, 1
    while found.exists():
        number += 1
        found = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return found
