"""Sparse gradients, second order, merge plans."""

import statistics

from ._write import register, results, table


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
    names = ("no communication", "topk", "lags", "greedy", "ours")
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
            line.append(f"{statistics.median(times):.0f}" + "*" * bool(of["marks"]))
        lines.append(line)
    return table(["", *cells], lines)


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
        if case["world_size"] != 16 or case["bandwidth"] not in ("1Gbit", "10Gbit"):
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
