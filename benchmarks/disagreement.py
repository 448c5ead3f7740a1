"""Do the distance of weights or that of predictions foretell what accuracy loses?

Trains contestants of `benchmarks.local_steps` once more, on another seed, with the rates found
there. In the middle of training, replicas are measured every fourth step of a hundred: the
consensus distance of their weights, and the Jensen-Shannon distance of what they predict for 256
test images. Ranked against how much accuracy and loss at the end are behind all-reduce's:

    python -m benchmarks.disagreement
"""

import argparse
import json
import statistics

import torch

from benchmarks import _common
from benchmarks.local_steps import CONTESTANTS, Ranks, load, run

SEED = 50
WATCHED = range(500, 600, 4)
NAMES = ("ours", "ours, overlap", "plain gossip", "NoLoCo", "SPARTA")


def distances(ranks: Ranks, probe: torch.Tensor) -> tuple[float, float]:
    """Of weights, and of predictions: as `session.consensus_distance` and `.disagreement`."""
    of_weights = sum((x - x.mean(0)).square().sum() / ranks.count for x in ranks.x)
    images = probe.expand(ranks.count, *probe.shape)
    p = ranks.logits(images, ranks.x).double().softmax(-1)
    divergence = torch.special.entr(p.mean(0)).sum(-1) - torch.special.entr(p).sum(-1).mean(0)
    return float(of_weights) ** 0.5, divergence.clamp_min(0).sqrt().mean().item()


def ranked(values: list[float]) -> list[float]:
    """The place of each value in their order."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    return [float(order.index(i)) for i in range(len(values))]


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    before = json.loads((_common.RESULTS / "local_steps.json").read_text())
    steps, images = before["settings"]["steps"], load()
    probe, rows, found = images["test"][0][:256], [], {}
    for p in (8, 32):
        exact = run(CONTESTANTS["all-reduce"], p, 1, steps, 0.03, 0.0, SEED, images)
        of_p = []
        for row in before["rows"]:
            name, period = row["contestant"], row["local_steps"]
            if row["ranks"] != p or name not in NAMES or period == 1:
                continue
            seen: list[tuple[float, float]] = []

            def watch(t: int, ranks: Ranks, seen: list[tuple[float, float]] = seen) -> None:
                if t in WATCHED:
                    seen.append(distances(ranks, probe))

            outer = row["outer_lr"] or 0.0
            end = run(
                CONTESTANTS[name], p, period, steps, row["inner_lr"], outer, SEED, images, watch
            )
            weights, predictions = map(statistics.fmean, zip(*seen, strict=True))
            of_p.append(
                {
                    "ranks": p,
                    "contestant": name,
                    "local_steps": period,
                    "consensus_distance": round(weights, 3),
                    "disagreement": round(predictions, 4),
                    "accuracy_lost": round(exact["accuracy"] - end["accuracy"], 3),
                    "loss_lost": round(end["loss"] - exact["loss"], 4),
                }
            )
            print(of_p[-1], flush=True)
        for lost in ("accuracy_lost", "loss_lost"):
            for what in ("consensus_distance", "disagreement"):
                both = [ranked([row[key] for row in of_p]) for key in (what, lost)]
                found[f"{what}, {lost}, {p} ranks"] = round(statistics.correlation(*both), 3)
        rows += of_p
    print(json.dumps(found, indent=2))
    _common.write("disagreement", {"rank_correlation": found, "rows": rows})


if __name__ == "__main__":
    main()
