"""The report of a run, or of several side by side: one HTML page that needs nothing but itself."""

import os
from collections import Counter
from contextlib import suppress
from pathlib import Path

from ._page import page
from ._run import Run, read_run


def write_report(
    *run_dirs: str | os.PathLike[str], out: str | os.PathLike[str] | None = None
) -> Path:
    """Writes one HTML page on a run, or one that shows several runs side by side.

    Reads `config.json`, `summary.json`, `metrics-rank*.jsonl` and `trace.json`, as far as they
    exist: of a run that was killed the report shows what was written and says what is missing. The
    page loads nothing, from the network or otherwise, and may be sent to others as it is.

    Local: reads and writes files only.

    Args:
        run_dirs: Directories that `gossipgrad train` wrote to. The others are compared with the
            first.
        out: The file to write, replaced if there is one; None for `report.html` in the directory
            of the only run.

    Returns:
        The path of the report.

    Raises:
        ValueError: There is no run, `out` is missing and there are several, `out` is a folder or
            cannot be written, or a directory holds nothing of a run.

    Example:
        >>> write_report()
        Traceback (most recent call last):
        ...
        ValueError: there is no run to report on: name the directory of one
    """
    if not run_dirs:
        raise ValueError("there is no run to report on: name the directory of one")
    if out is None and len(run_dirs) > 1:
        raise ValueError(
            f"a report on {len(run_dirs)} runs belongs to none of them: say with out where to "
            "write it"
        )
    report = Path(run_dirs[0]) / "report.html" if out is None else Path(out)
    if report.is_dir():
        raise ValueError(
            f"cannot write {report}: it is a folder; name a file in it, such as "
            f"{report / 'report.html'}"
        )
    content = render_report(*run_dirs)
    partial = report.with_name(report.name + ".partial")
    try:
        # A name that is not UTF-8, of a folder for example, is written with escapes.
        partial.write_text(content, encoding="utf-8", errors="backslashreplace")
        partial.replace(report)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise ValueError(f"cannot write {report}: {error.strerror}") from error
    return report


def render_report(*run_dirs: str | os.PathLike[str]) -> str:
    """The page that `write_report` writes, as text; writes nothing.

    Raises:
        ValueError: A directory holds nothing of a run.
    """
    return page(_with_unique_names([read_run(each) for each in run_dirs], run_dirs))


def _with_unique_names(runs: list[Run], run_dirs: tuple[str | os.PathLike[str], ...]) -> list[Run]:
    """The runs, those of equal name called by as much of their path as differs."""
    paths = [Path(each).resolve() for each in run_dirs]
    names = [run.name for run in runs]
    for length in range(2, max(len(path.parts) for path in paths) + 1):
        counts = Counter(name for name, _ in {*zip(names, paths, strict=True)})
        names = [
            str(Path(*path.parts[-length:])) if counts[name] > 1 else name
            for name, path in zip(names, paths, strict=True)
        ]
    seen: Counter[str] = Counter()
    for index, name in enumerate(names):
        seen[name] += 1
        if seen[name] > 1:
            names[index] = f"{name} ({seen[name]})"
    return [run._replace(name=name) for run, name in zip(runs, names, strict=True)]
