"""Sparse gradients, second order, checkpoints, simulation, encryption."""

import statistics

from ._write import ended, rate, register, results, spread, table


@register("sparse convergence")
def sparse_convergence() -> str:
    shown = (
        *("density 0.01", "density 0.001", "the default of gg.sparsify", "density 0.01, warm-up"),
        *("density 0.001, warm-up", "density 0.01, warm-up, momentum correction"),
        "density 0.001, warm-up, momentum correction",
    )
    found = {
        (row["method"], row["model"]): row
        for row in results("sparse_convergence")["rows"]
        if row["world_size"] == 4
    }
    heads = {"lenet": "LeNet", "resnet20": "ResNet-20", "gpt": "GPT"}
    dense = [
        f"{name}, dense {100 * statistics.fmean(found['dense', model]['accuracy']):.2f} %"
        for model, name in heads.items()
    ]
    lines = []
    for method in shown:
        line = [method]
        for model in heads:
            row = found.get((method, model))
            if row is None:
                line.append("-")
                continue
            differences, half = row["difference_to_dense_points"], row.get("half_width_95_points")
            line.append(
                f"{statistics.fmean(differences):+.2f}"
                + (" (one seed)" if half is None else f" +- {half:.2f}")
            )
        lines.append(line)
    return table(["4 ranks, points behind dense", *dense], lines)


@register("sparse network")
def sparse_network() -> str:
    names = ("no communication", "wfbp", "mg-wfbp", "topk", "lags", "greedy", "ours")
    shown = dict(zip(names, names, strict=True))
    shown = {names[0]: names[0], "DDP fp32": "ddp", "DDP fp16": "ddp, fp16 hook"} | shown
    cells: dict[str, dict[str, dict]] = {}
    for cell in results("sparse_network")["cells"]:
        full_rate = cell["rate_bits_per_second"] * cell["time_factor"] / cell["size_factor"]
        if (cell["world_size"], round(full_rate), cell["density"]) == (16, 10**9, 0.001):
            cells.setdefault(cell["profile"], {})[cell["contestant"]] = cell
    lines = []
    for name, contestant in shown.items():
        line = [name]
        for of in (found[contestant] for found in cells.values()):
            times = [1e3 * seconds / of["time_factor"] for seconds in of["step_seconds"]]
            line.append(spread(times, "{:.0f}") + "*" * bool(of["marks"]))
        lines.append(line)
    return table(["", *cells], lines)


@register("sparse time to accuracy")
def sparse_time_to_accuracy() -> str:
    lines = []
    for row in results("sparse_time_to_accuracy")["rows"]:
        shares = [share for share in row["shares_of_ddp_time"].values() if share is not None]
        lines.append(
            [
                f"{row['task']}, {rate(row)}",
                *(ended(runs) for runs in row["runs"].values()),
                spread(shares, "{:.2f}"),
            ]
        )
    ways = ["DDP", "omgs", "a quarter more epochs", "half more epochs"]
    return table(["", *ways, "time, of DDP's"], lines)


@register("selection")
def selection() -> str:
    found = results("selection")
    lines = []
    for cell in found["cells"]:
        if (cell["threads"], cell["distribution"]) != (1, "accumulator"):
            continue
        for density in ("0.001", "0.01"):
            if cell["numel"] not in (1 << 20, 25_000_000, 100_000_000):
                continue
            ways = cell["densities"][density]
            times = [
                1e3 * ways[way]["cpu_seconds_quartiles"][1]
                for way in ("torch.topk", "np.argpartition", "top_k")
            ]
            held = found["memory"][str(cell["numel"])][density]
            lines.append(
                [
                    f"{cell['numel']:,}",
                    f"{100 * float(density):g} %",
                    *(f"{time:,.0f} ms" if time >= 100 else f"{time:.2g} ms" for time in times),
                    *(f"{held[way] / 1e6:,.1f} MB" for way in ("torch.topk", "top_k")),
                ]
            )
    ways = ["`torch.topk`", "`np.argpartition`", "`top_k`"]
    return table(["values", "density", *ways, "memory of torch", "ours"], lines)


@register("plans")
def plans() -> str:
    shown = {
        ("DistributedDataParallel", "dense"): "DDP",
        ("DistributedDataParallel", "fp16"): "DDP fp16",
        ("top-k, one group", "sparse"): "one group",
        ("lags, each tensor", "sparse"): "each tensor",
        ("omgs, published rule", "sparse"): "published rule",
    }
    lines = []
    for case in results("plans")["grid"]:
        if case["world_size"] != 16 or case["bandwidth"] not in ("100Mbit", "1Gbit", "10Gbit"):
            continue
        if case["profile"] not in ("resnet50", "gpt2"):
            continue
        by_way = {(a["name"], a["method"]): a["step_seconds"] for a in case["alternatives"]}
        lines.append(
            [
                f"{case['profile']}, {case['bandwidth']}/s",
                f"{case['sparse_groups']} of {case['groups']}",
                f"{1e3 * case['step_seconds']:,.0f} ms",
                *(f"{1e3 * by_way[way]:,.0f} ms" for way in shown),
            ]
        )
    return table(["", "groups compressed", "plan", *shown.values()], lines)


@register("second-order spikes")
def second_order_spikes() -> str:
    names = {
        "synchronous": "`Synchronous(10)`",
        "staggered": "`Staggered(10)`",
        "background": "`Background(10, 5)`",
        "background, fixed delay": "the same, `fixed_delay=True`",
    }
    found = results("second_order_spikes")["figures"]["SOAP"]
    rows = [
        [name, f"{found[way]['p99_over_median']:.2f}", f"{found[way]['wall_seconds']:.1f} s"]
        for way, name in names.items()
    ]
    return table(["`refresh=`", "a step's 99th percentile over median", "all steps"], rows)


@register("second-order loss")
def second_order_loss() -> str:
    found = results("second_order_loss")
    rows = []
    for name in ("SOAP", "Shampoo", "KLShampoo", "Muon"):
        line = [f"`gg.{name}`"]
        for task in ("gpt", "mlp"):
            row = found[task]["optimizers"][name]
            share = statistics.fmean(row["share_of_steps"])
            line.append(f"{share:.2f}, {row['mean']:.3f}")
        line.append(f"{found['gpt']['optimizers'][name]['ms_a_step']:.1f}")
        rows.append(line)
    alone = found["gpt"]["optimizers"]["AdamW"]["ms_a_step"]
    heads = ["GPT: steps, loss", "perceptron: steps, loss", f"ms a step, GPT (AdamW {alone:.1f})"]
    return table(["", *heads], rows)


@register("virtual ranks")
def virtual_ranks() -> str:
    found = {
        (row["strategy"], row["world_size"]): row
        for row in results("virtual_ranks")["rows"]
        if row["model"] == "mlp"
        and (row["lr_factor"], row["epochs_factor"], row["batch_factor"]) == (1, 1, 1)
    }
    rows = []
    for way in (
        "allreduce",
        "gossip",
        "gossip, no rotation",
        "gossip, state",
        "every-log-p",
        "local",
    ):
        cells = [f"{100 * found[way, size]['accuracy_mean']:.2f}" for size in (8, 32, 128)]
        rows.append([way, *cells])
    return table(["", "8 ranks", "32 ranks", "128 ranks"], rows)


@register("checkpoint")
def checkpoint() -> str:
    columns = {
        "held": "`Saver.save`",
        "slowed": "and in slower steps",
        "torch_save": "`torch.save`",
        "save": "`checkpoint.save`",
    }
    rows = []
    for row in results("checkpoint")["rows"]:
        line = [f"{12 * row['parameters'] / 1e6:.0f} MB"]
        for key in columns:
            low, middle, high = (
                f"{1e3 * seconds:,.0f}" if abs(seconds) >= 0.1 else f"{1e3 * seconds:.3g}"
                for seconds in row["quartiles_seconds"][key]
            )
            line.append(f"{middle} ms ({low} to {high})")
        rows.append(line)
    return table(["state", *columns.values()], rows)


@register("encryption")
def encryption() -> str:
    rows = []
    for size, ways in results("encryption")["results"].items():
        ends = [ways["plain"], ways["encrypted"]]
        rows.append(
            [
                size,
                *(
                    f"{1e3 * of['seconds_median']:.1f} ms, "
                    f"{of['bytes_per_second_each_way'] / 1e6:.0f} MB/s"
                    for of in ends
                ),
                *(f"{1e3 * of['cpu_seconds_per_megabyte_sent']:.1f} ms a MB" for of in ends),
            ]
        )
    heads = ["plain", "encrypted", "plain, processor", "encrypted, processor"]
    return table(["a message", *heads], rows)
