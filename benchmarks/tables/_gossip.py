"""README, performance, and the pages of gossip."""

import statistics

from ._write import ended, rate, register, results, spread, table


@register("headline")
def headline() -> str:
    (lenet,) = [
        row
        for row in results("accuracy")["rows"]
        if row["task"] == "Fashion-MNIST, LeNet" and row["world_size"] == 8
    ]
    behind = lenet["difference_to_allreduce_points"]["gossip"]
    cells = _network_cells()
    ddp, gossip = (f"{1e3 * cells[name, 8, 1e8][0]:.0f} ms" for name in ("ddp", "gossip"))
    shares = results("time_to_accuracy")["rows"][0]["shares_of_ddp_time"].values()
    asleep = {
        cell["contestant"]: f"{1e3 * max(cell['longest_step_seconds']):,.0f} ms"
        for cell in results("stall")["cells"]
        if cell["scenario"] == "sleeps"
    }
    return table(
        ["", "all-reduce (DDP)", "gossip", "where"],
        [
            [
                "accuracy after equal epochs",
                *(
                    f"{100 * statistics.fmean(lenet['accuracy'][name]):.2f} %"
                    for name in ("allreduce", "gossip")
                ),
                "LeNet on Fashion-MNIST, SGD, 8 workers, 10 epochs, 5 seeds: "
                f"{behind['mean']:+.2f} +- {behind['half_width_95']:.2f} points",
            ],
            [
                "time of a step",
                ddp,
                gossip,
                "compute of a ResNet-50 on a GPU replayed at 3 x 292 ms; 8 workers in network "
                "namespaces, links that stand for 10 Gbit/s",
            ],
            [
                "time to DDP's accuracy",
                "1",
                spread([share for share in shares if share], "{:.2f}"),
                "LeNet on Fashion-MNIST, 4 workers, 50 Mbit/s, 3 seeds",
            ],
            [
                "longest step while another worker sleeps 6 s",
                asleep["DDP"],
                f'{asleep["gossip, stale"]} with `mode="stale"`',
                "4 workers, steps of 20 ms, the worst of 3 runs",
            ],
        ],
    )


def _accuracy(name: str) -> str:
    rows = []
    for row in results(name)["rows"]:
        behind = row["difference_to_allreduce_points"]["gossip"]
        accuracies = [statistics.fmean(row["accuracy"][way]) for way in ("allreduce", "gossip")]
        rows.append(
            [
                row["task"],
                str(row["world_size"]),
                *(f"{100 * accuracy:.2f} %" for accuracy in accuracies),
                f"{behind['mean']:+.2f} +- {behind['half_width_95']:.2f}",
            ]
        )
    return table(["task", "workers", "all-reduce", "gossip", "difference, points"], rows)


@register("accuracy")
def accuracy() -> str:
    return _accuracy("accuracy")


@register("workloads")
def workloads() -> str:
    return _accuracy("workloads")


def _network_cells() -> dict[tuple[str, int, float], tuple[float, bool]]:
    """Median step in seconds, and whether it is marked, by contestant, workers and rate.

    `gossip, sync` is of the later run, in which it hid behind the next forward pass.
    """
    cells = [c for c in results("network")["cells"] if c["contestant"] != "gossip, sync"]
    cells += [c for c in results("network_sync")["cells"] if c["contestant"] == "gossip, sync"]
    return {
        (cell["contestant"], cell["world_size"], cell["rate_bits_per_second"]): (
            cell["step_seconds_median"],
            bool(cell["marks"]),
        )
        for cell in cells
        if cell["profile"] == "resnet50" and not cell["error"]
    }


@register("network")
def network() -> str:
    shown = {
        name: name
        for name in (
            *("no communication", "gossip", "gossip, bf16 wire", "gossip, sync"),
            "Decent-DP, one-peer exponential",
        )
    }
    shown |= {f"DDP{hook}": f"ddp{hook}" for hook in (", fp16 hook", "", ", PowerSGD")}
    shown |= {"all-reduce layer by layer": "agd", "local SGD, period 8": "local SGD, period 8"}
    places = [(4, 1e8), (8, 1e8), (16, 1e8), (16, 1e9)]
    cells = _network_cells()
    rows = []
    for name, contestant in shown.items():
        found = [cells.get((contestant, *place)) for place in places]
        rows.append(
            [
                name,
                *("-" if cell is None else f"{1e3 * cell[0]:.0f}{'*' * cell[1]}" for cell in found),
            ]
        )
    heads = [f"{workers}, {100 if rate == 1e8 else 1000} Mbit/s" for workers, rate in places]
    return table(["workers, links", *heads], rows)


@register("time to accuracy")
def time_to_accuracy() -> str:
    rows = []
    for row in results("time_to_accuracy")["rows"]:
        shares = list(row["shares_of_ddp_time"].values())
        rows.append(
            [
                f"{row['task']}, {row['world_size']} at {rate(row)}",
                *(ended(runs) for runs in row["runs"].values()),
                spread([share for share in shares if share is not None], "{:.2f}"),
            ]
        )
    ways = ["DDP", "gossip, as many epochs", "a quarter more", "twice as many"]
    return table(["real training", *ways, "gossip's time, of DDP's"], rows)


@register("stall")
def stall() -> str:
    cells = {(c["contestant"], c["scenario"]): c for c in results("stall")["cells"]}
    rows = []
    for name, contestant in {
        "gossip, mode `stale`": "gossip, stale",
        "gossip, mode `overlap`": "gossip, overlap",
        "Decent-DP": "Decent-DP, one-peer exponential",
        "DDP": "DDP",
    }.items():
        asleep, dead, slow, alone = (
            cells[contestant, scenario] for scenario in ("sleeps", "dies", "is slow", "nothing")
        )
        steps = min(min(run) for run in dead["steps_of_others"])
        rows.append(
            [
                name,
                f"{1e3 * max(asleep['longest_step_seconds']):,.0f} ms",
                str(steps) if steps == 200 else f"{steps}, then it ends",
                f"{max(slow['seconds_of_others']):.1f} s, "
                f"undisturbed {max(alone['seconds_of_others']):.1f} s",
            ]
        )
    return table(
        [
            "",
            "one sleeps 6 s: longest step of the others",
            "one is killed: steps of the others, of 200",
            "one at half speed: the others' 200 steps",
        ],
        rows,
    )


@register("step")
def step() -> str:
    tasks = results("step")["tasks"]
    rows = []
    for name in ("gossip", "gossip, bf16 wire", "ddp", "no communication"):
        row = [name.replace("ddp", "DDP")]
        for task in tasks.values():
            way = task[name]
            cell = f"{way['step_milliseconds_median']:,.0f} ms"
            row.append(cell if name == "ddp" else f"{cell}, {way['ratio_to_ddp_median']:.2f}")
        rows.append(row)
    return table(["time of a step, share of DDP's", *tasks], rows)


@register("drift")
def drift() -> str:
    rows = results("reference_drift")["consensus_distance"]
    found = {(row["strategy"], row["world_size"]): row["consensus_distance"] for row in rows}
    rounds = ("50", "2000")
    lines = []
    for way in dict.fromkeys(row["strategy"] for row in rows):
        if way == "lagged, weights+state":
            continue
        digits = ".2f" if found[way, 4]["50"] >= 0.2 else ".3f"
        cells = [format(found[way, size][when], digits) for size in (4, 8) for when in rounds]
        lines.append([way.replace("local", "no communication"), *cells])
    heads = [f"{size} ranks, {when}" for size in (4, 8) for when in rounds]
    return table(["", *heads], lines)


@register("loss at step 50")
def loss_at_step_50() -> str:
    found = {
        (row["strategy"], row["world_size"]): row for row in results("reference_drift")["loss"]
    }
    lines = []
    for way in ("overlap", "lagged"):
        line = [way]
        for size in (4, 8):
            row = found[way, size]
            less = f"{row['minus_sync_mean']:+.3f} ({row['minus_sync_standard_deviation']:.3f})"
            line.append(less)
        lines.append(line)
    return table(["loss, minus that of `sync`", "4 ranks", "8 ranks"], lines)


@register("staleness")
def staleness() -> str:
    found = {(r["contestant"], r["max_staleness"]): r for r in results("staleness")["rows"]}
    rows = []
    for d in (0, 1, 2, 4, 8):
        late, in_time = (found[f"stale, {when}", d] for when in ("late", "in time"))
        rows.append(
            [
                str(d),
                *(f"{100 * late['accuracy']:.2f} %", f"{late['mean_distance']:.3f}"),
                *(f"{100 * in_time['accuracy']:.2f} %", f"{in_time['mean_distance']:.3f}"),
            ]
        )
    return table(["d", "all late", "distance", "all in time", "distance"], rows)


@register("compressed gossip")
def compressed_gossip() -> str:
    rows = [
        [
            row["contestant"],
            row["topology"],
            f"{row['bytes_per_step']:,.0f}",
            *(f"{100 * row[name]:.2f} %" for name in ("accuracy", "worst_replica_accuracy")),
            f"{row['mean_distance']:.2f}",
        ]
        for row in results("compressed_gossip")["rows"]
        if not row["contestant"].startswith("naive")
    ]
    return table(["sent", "topology", "bytes a step", "consensus", "worst", "distance"], rows)


@register("local steps")
def local_steps() -> str:
    found = {
        (row["contestant"], row["local_steps"], row["ranks"]): row
        for row in results("local_steps")["rows"]
    }
    shown = {
        "ours": "`sync`",
        "ours, two exchanges": "`sync`, `exchanges=2`",
        "ours, overlap": "`overlap`",
        "plain gossip": "`sync`, `every=H`",
        "DiLoCo": "DiLoCo",
        "Streaming DiLoCo": "Streaming DiLoCo",
        "NoLoCo": "NoLoCo",
        "SPARTA": "SPARTA, a share of 1 / H a step",
        "SparseLoCo": "SparseLoCo, 1/32 at 2 bits",
    }
    lines = []
    for way, name in shown.items():
        line = [name]
        for ranks in (8, 32):
            row = found[way, 32, ranks]
            line.append(
                f"{row['accuracy_mean']:.2f} +- {row['accuracy_interval']:.2f}, "
                f"{row['megabytes']:.3g} MB"
            )
        lines.append(line)
    return table(["H = 32", "8 ranks", "32 ranks"], lines)


@register("gpu")
def gpu() -> str:
    cells = results("gpu")["step"]
    rows = []
    for name in cells[0]["contestants"]:
        row = [name]
        for cell in cells:
            held = cell["contestants"][name]
            ratio = f", {held['ratio_to_no_exchange']:.2f}" if name != "no exchange" else ""
            row.append(f"{held['ms_median']:.0f} ms{ratio}")
        rows.append(row)
    head = [f"batch {cell['batch']}" for cell in cells]
    return table(["time of a step, ratio to no exchange", *head], rows)
