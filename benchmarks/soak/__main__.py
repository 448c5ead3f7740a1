"""More than a million exchanges over real links, and whether anything grows with them.

Four processes train a tiny model by gossip over ZeroMQ on loopback, with signs of life, a consensus
and a checkpoint now and then: in mode overlap, in mode stale, and in many sessions one after the
other. Memory, open handles, threads, Python's blocks and the entries of all containers are looked
at all the while; over the second half of each part they must be flat, by a rule that is written
down beside them. Then hundreds join two ranks, one after the other, and leave: what each leaves
behind is measured.

    python -m benchmarks.soak                # about 45 minutes
    python -m benchmarks.soak --parts stale  # one again, in place of that there is
    python -m benchmarks.soak --parts joins
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks._common import RESULTS, made_by, write
from benchmarks._ends import ends_as_ctrl_c
from benchmarks._pages import DOCS, fill, table

from ._flat import ALLOWED, judge
from ._joins import JOINS, run_joins
from ._rank import BUCKET_BYTES, PARTS, rank_main
from ._sizes import MEASURES

RANKS = 4
STEPS = 150_000
_JOINS = "joins"
_OF_JOINS = {
    "store_keys": "keys in the store",
    "record_bytes": "bytes of the record of the membership, read at every beat",
    "rss_bytes": "bytes of memory, of all ranks together",
    "blocks": "blocks of Python's allocator, of all ranks together",
    "entries": "entries of the containers of one rank",
}


def run(steps: int, names: Sequence[str]) -> list[dict[str, Any]]:
    """Runs parts on all ranks; samples and what became of exchanges, by part and rank.

    Raises:
        RuntimeError: A rank failed.
    """
    # torch asks for the name of whoever connects, and a resolver may not answer.
    os.environ.setdefault("RES_OPTIONS", "timeout:1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.soak._rank", "torch._dynamo"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="gossipgrad-soak-") as name:
        folder = Path(name)
        ranks = [
            context.Process(target=rank_main, args=(rank, RANKS, store.port, folder, steps, names))
            for rank in range(RANKS)
        ]
        try:
            for process in ranks:
                process.start()
            for rank, process in enumerate(ranks):
                process.join()
                if process.exitcode:
                    raise RuntimeError(f"rank {rank} ended with exit code {process.exitcode}")
        finally:
            for process in ranks:
                process.kill()
        lines = {
            rank: [
                json.loads(line)
                for line in (folder / f"samples-rank{rank}.jsonl").read_text().splitlines()
            ]
            for rank in range(RANKS)
        }
    return [_part(name, lines) | {"steps_of_all_parts": steps} for name in names]


def _part(name: str, lines: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    """What the ranks wrote of a part."""
    own = {rank: [line for line in told if line["part"] == name] for rank, told in lines.items()}
    samples = {
        rank: [{k: v for k, v in line.items() if k != "part"} for line in told if "seconds" in line]
        for rank, told in own.items()
    }
    outcomes: Counter[str] = Counter()
    for told in own.values():
        for line in told:
            outcomes.update(line.get("outcomes", {}))
    places = [line["places"] for line in own[0] if "places" in line]
    return {
        "part": name,
        "exchanges": outcomes["delivered"] // 2,  # each counts at both ends
        "outcomes": dict(outcomes),
        "seconds": samples[0][-1]["seconds"] - samples[0][0]["seconds"],
        "found": {rank: judge(told) for rank, told in samples.items()},
        "places": {"first": places[0], "last": places[-1]},
        "samples": {
            rank: {key: [one[key] for one in told] for key in told[0]}
            for rank, told in samples.items()
        },
    }


def growing(figures: dict[str, Any]) -> list[str]:
    """What is not flat, in words."""
    return [
        f"{part['part']}: rank {rank}: {measure} grew by {found['growth']:,.1f} "
        f"(allowed {found['allowed']:,.1f}) at {found['mean']:,.1f}"
        for part in figures["parts"]
        for rank, measures in part["found"].items()
        for measure, found in measures.items()
        if not found["flat"]
    ]


def page_table(figures: dict[str, Any]) -> str:
    """What each part held, at most and by how much it grew, over all ranks."""
    head = ["part", "exchanges", "memory, MB", "handles", "threads", "blocks", "entries"]
    rows = []
    for part in figures["parts"]:
        cells = [part["part"], f"{part['exchanges']:,}"]
        for measure in MEASURES:
            found = [measures[measure] for measures in part["found"].values()]
            scale = 1e6 if measure == "rss_bytes" else 1.0
            digits = 1 if measure == "rss_bytes" else 0
            mean = max(one["mean"] for one in found) / scale
            grew = max(one["growth"] for one in found) / scale
            cells.append(f"{mean:,.{digits}f} ({grew:+,.{digits + 1}f})")
        rows.append(cells)
    return table(head, rows)


def joins_table(joins: dict[str, Any]) -> str:
    """What is held at the end of many joins, and by how much that grew with each."""
    rows = []
    for name, what in _OF_JOINS.items():
        last, grew = joins["samples"][name][-1], joins["growth_per_join"][name]
        rows.append([what, f"{last:,}", f"{grew:+,.2f}"])
    return table(["of joins", f"after {joins['joins']}", "by a join"], rows)


def main() -> int:
    """Runs it and writes it down; the exit status tells whether anything grows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = [*(part.name for part in PARTS), _JOINS]
    parser.add_argument("--steps", type=int, default=STEPS, help="of each rank, in all parts")
    parser.add_argument("--parts", nargs="+", choices=names, default=names, help="the others stay")
    parser.add_argument("--joins", type=int, default=JOINS, help="how many, in the part of them")
    parser.add_argument("--out", type=Path, default=RESULTS / "soak.json")
    options = parser.parse_args()
    try:
        with ends_as_ctrl_c():
            of_rounds = [name for name in options.parts if name != _JOINS]
            parts = run(options.steps, of_rounds) if of_rounds else []
            joins = run_joins(options.joins) if _JOINS in options.parts else None
        parts = [made_by("soak") | part for part in parts]
        joins = joins and made_by("soak") | joins
    except KeyboardInterrupt:
        print("\nstopped; nothing was written", file=sys.stderr)
        return 130
    if options.out.exists():
        kept = json.loads(options.out.read_text())
        parts += [part for part in kept["parts"] if part["part"] not in options.parts]
        joins = joins or kept.get(_JOINS)
    parts.sort(key=lambda part: names.index(part["part"]))
    total = sum(part["exchanges"] for part in parts)
    figures = {
        "seed": 0,
        "ranks": RANKS,
        "bucket_bytes": BUCKET_BYTES,
        "exchanges": total,
        "rule": {
            "over": "the second half of each part, on each rank: the rise of the least-squares "
            "line, at most this share of the mean or so much, whichever is more",
            "allowed": {name: {"share": a, "least": b} for name, (a, b) in ALLOWED.items()},
        },
        "parts": parts,
        **({} if joins is None else {_JOINS: joins}),
    }
    print(f"{total:,} exchanges in {sum(part['seconds'] for part in parts):.0f} s")
    told = [page_table(figures), *([] if joins is None else [joins_table(joins)])]
    print("\n\n".join(told))
    print(write("soak", figures, path=options.out))
    page = DOCS / "soak.md"
    if options.out == RESULTS / "soak.json" and page.exists():
        for each in told:
            page.write_text(fill(page.read_text(), each))
    grows = growing(figures)
    for line in grows:
        print(line, file=sys.stderr)
    return int(bool(grows))


if __name__ == "__main__":
    sys.exit(main())
