"""The short help of `gossipgrad train`: what people use first, then every option in a line."""

import ast
import inspect
import textwrap
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from gossipgrad.train import STRATEGIES, options_by_section

_COLUMNS = 100
_NAME_COLUMNS = 26
_GROUPS = {
    "most used": "job data model strategy optimizer epochs batch_size lr nproc out",
    "steps": "max_steps accumulate clip_norm amp weight_decay seed apoptosis",
    "learning rate": "lr_rule warmup_epochs lr_schedule lr_step_epochs lr_gamma",
    "samples": "data_dir shuffle shards data_threads",
    "start, resume, join": (
        "config resume resume_step join overwrite run_name checkpoint_every keep_checkpoints"
    ),
    "figures": "evaluate_every keep_best log_every trace tensorboard wandb quiet",
    "machines": (
        "island device threads nodes node_rank rendezvous start_seconds lost_after_seconds"
    ),
}


def short_help(kind: type) -> str:
    """All options of a dataclass and of the sections, in a line each, but for those used most."""
    texts = _texts(kind)
    lines = [
        "usage: gossipgrad train [OPTIONS]",
        "",
        "Train a model on several workers. --help-all explains each option in full.",
    ]
    texts = _texts(kind)
    texts["strategy"] = f"How replicas are kept together: {', '.join(STRATEGIES)}"
    groups = {name: names.split() for name, names in _GROUPS.items()}
    known = {name for names in groups.values() for name in names} | {"options"}
    groups["more"] = [field.name for field in fields(kind) if field.name not in known]
    for group, names in groups.items():
        if names:
            lines += ["", f"{group}:"]
        for name in names:
            lines += _option(kind, name, texts[name], columns=2 if group == "most used" else 1)
    for section, options in options_by_section().items():
        lines += ["", f"--{section.replace('_', '-')}.NAME, or --NAME:"]
        for name, text in _texts(options).items():
            lines += _option(options, name, text)
    return "\n".join(lines) + "\n"


def _option(kind: type, name: str, text: str, *, columns: int = 1) -> list[str]:
    option, default = f"  --{name.replace('_', '-')}", kind.__dataclass_fields__[name].default
    shown = "" if default is None or default is False else f" ({default})"
    text = text.split(". ")[0].split("; ")[0].rstrip(".")
    if choices := _choices(get_type_hints(kind)[name]):
        before, _, rest = text.partition(": ")
        is_of_a_choice = rest and before.split(",")[0] in choices
        text = ("" if is_of_a_choice else f"{before}: ") + ", ".join(choices)
    room = columns * (_COLUMNS - _NAME_COLUMNS - 5 * (columns - 1)) - len(shown)
    text = textwrap.shorten(text, room, placeholder=" ...")
    indent = " " * _NAME_COLUMNS
    return textwrap.wrap(
        f"{option:<{_NAME_COLUMNS - 1}} {text}{shown}", _COLUMNS, subsequent_indent=indent
    )


def _choices(hint: Any) -> list[str]:
    """The words that an option takes, if it takes no others."""
    if get_origin(hint) is Literal:
        return [str(choice) for choice in get_args(hint)]
    parts = [part for part in get_args(hint) if part is not type(None)]
    return _choices(parts[0]) if len(parts) == 1 else []


def _texts(kind: type) -> dict[str, str]:
    """The texts below the fields of a dataclass, by name."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__[:-1]):
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        assert isinstance(body, ast.ClassDef)
        for field, after in zip(body.body, body.body[1:], strict=False):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                found[field.target.id] = " ".join(str(after.value.value).split())
    return found
