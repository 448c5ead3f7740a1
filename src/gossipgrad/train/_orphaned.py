"""The end of a run whose own processes are gone, by those who had joined it."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from ._config import TrainConfig
from ._joined import collect_joined, known_lost, read_file, some_go_on, taken_for_dead
from ._layout import RunDir
from ._losses import stands_for_most
from ._result import RankResult
from ._run_lock import run_lock
from ._summary import compose, finish


def put_together_if_orphaned(
    config: TrainConfig, run_dir: RunDir, results: Mapping[int, RankResult]
) -> dict[str, Any] | None:
    """The summary of a run that nobody else puts together: all ranks of its start are lost.

    None if they are not, or somebody is at it, or those here have left it and others go on.

    Args:
        config: The options, resolved.
        run_dir: The folder of the run.
        results: Of the ranks that joined here and came to their end.
    """
    assert config.nproc is not None, "resolve the configuration first"
    lost = known_lost(results.values())
    founders = range(config.nproc)
    if not set(founders) <= set(lost):
        return None
    if all(one.left for one in results.values()) and some_go_on(run_dir, results, lost):
        return None
    with run_lock(run_dir) as mine:
        if not mine:
            return None
        others, missing = collect_joined(run_dir, results, read=partial(read_file, run_dir))
        every = {**results, **others}
        why = {rank: taken_for_dead(lost[rank]) for rank in founders}
        exported = stands_for_most(
            {rank: one for rank, one in every.items() if run_dir.rank_model(rank).exists()}
        )
        summary = compose(
            config,
            every,
            {**why, **missing},
            world_size=config.nproc,
            exported=exported,
            stopped_by=None,
            run_dir=run_dir,
        )
        finish(run_dir, summary, exported)
        return summary
