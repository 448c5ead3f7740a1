"""The options of a training run: frozen dataclasses, checked when made, written as JSON."""

import dataclasses
import json
import math
import platform
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from ._folder import write_whole
from ._optimizer_options import SECOND_ORDER, SECTIONS
from ._options import check_at_least, check_fields, check_rule, from_plain, make_plain
from .strategies import (
    STRATEGIES,
    Setting,
    Strategy,
    check_options,
    find,
    options_by_section,
    sections_of,
)

# Of each optimizer, where none is given.
DEFAULT_LR = {
    "sgd": 0.1,
    "adamw": 1e-3,
    "gossip-adamw": 1e-3,
    "muon": 1e-3,
    "soap": 3e-3,
    "kl-shampoo": 3e-3,
    "shampoo": 1e-3,
}
# What config.json holds beside the options.
_NOTES = ("strategy_is", "unused", "versions")
_PATHS = ("out", "data_dir", "resume")
# Of a start, and not of the run.
_OF_A_START = ("out", "overwrite", "resume", "resume_step")
_OF_A_RUN = ("run_name",)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """One training run."""

    job: str | None = None
    """A model, data and loss of your own, as MODULE:FUNCTION: the function returns a
    `gossipgrad.train.Job`. None: what data and model say."""
    data: Literal["digits", "fashion-mnist"] = "digits"
    """Data set. digits is part of the package; fashion-mnist is fetched once if missing."""
    model: Literal["mlp", "lenet"] = "mlp"
    """Model. mlp: two hidden layers of 128; lenet takes the 28x28 images of fashion-mnist."""
    strategy: str = "gossip"
    """How replicas are kept together, by a name of `gossipgrad.train.STRATEGIES`."""
    optimizer: Literal["sgd", "adamw", "gossip-adamw", "muon", "soap", "kl-shampoo", "shampoo"] = (
        "sgd"
    )
    """Optimizer, the same on every rank. muon: `gossipgrad.Muon`, with AdamW for embeddings, heads,
    biases and norms. soap, kl-shampoo, shampoo: preconditioned by second-order statistics, AdamW
    for embeddings, biases and norms."""
    epochs: int = 20
    """Passes over the training part, each rank over its share."""
    max_steps: int | None = None
    """End the run after so many steps, if that is before the end of the epochs; the learning rate
    falls by then."""
    batch_size: int = 16
    """Samples of a pass on each rank; a step has one pass, or `accumulate`."""
    accumulate: int = 1
    """Passes a step, whose mean gradient it takes. With Job.train_loader each of its batches is
    divided into so many."""
    clip_norm: float | None = None
    """Scale the gradients of a step down to this norm, of all parameters together, where it is
    above; None: they stay."""
    amp: Literal["bfloat16"] | None = None
    """Run forward passes and losses of training under autocast to this type; weights, exchanges
    and evaluations keep full precision. None: all does."""
    lr: float | None = None
    """Learning rate, of one rank; None: 0.1 for sgd, 0.003 for soap and kl-shampoo, else 0.001."""
    lr_rule: Literal["none", "linear", "sqrt"] = "none"
    """What the learning rate is multiplied by: 1 (none, what GossipGraD's authors did in their
    code), the number of ranks (linear), or its square root (sqrt)."""
    warmup_epochs: int = 0
    """Epochs in which the rate rises, step by step, before the schedule begins."""
    lr_schedule: Literal["cosine", "constant", "linear", "step"] = "cosine"
    """cosine, linear: the rate falls to 0 over the run, step by step. step: it drops every
    lr_step_epochs. constant: it stays."""
    lr_step_epochs: int | None = None
    """Epochs between two drops of lr_schedule step, more than warmup_epochs; None: a third of the
    run."""
    lr_gamma: float = 0.1
    """What a drop of lr_schedule step multiplies the rate by."""
    weight_decay: float = 5e-4
    """Weight decay."""
    seed: int = 0
    """Decides initial weights, order of samples and partners."""
    island: int | Literal["node"] = 1
    """Ranks that share a replica: they average gradients, as DDP does, and islands gossip. Ranks 0
    to island - 1 are the first one. node: those of a machine, by LOCAL_WORLD_SIZE or Slurm."""
    nproc: int | None = None
    """Processes to start on this machine; None: 4. Under torchrun or Slurm the world is given,
    and this is left out."""
    out: Path | None = None
    """Folder of the run; None: a new one under runs/."""
    overwrite: bool = False
    """Replace the run that `out` holds."""
    data_dir: Path | None = None
    """Folder of data sets; None: $GOSSIPGRAD_DATA, then the cache of the user."""
    shuffle: Literal["global", "ring", "local"] = "global"
    """Which samples a rank trains on. global: an even share of all, drawn again each epoch, and
    assigned again when ranks of a gossip run join or leave. local: its own shard. ring: a shard in
    memory whose rows move on to the next rank with every step; a resumed run begins with the shards
    of the start."""
    shards: Literal["random", "by-label"] = "random"
    """How shuffle ring and local make the shards. by-label: in the order of classes, so that each
    rank has few of them."""
    data_threads: int = 0
    """Threads of a rank that make batches ahead; 0: made when they are needed."""
    device: Literal["cpu", "cuda", "auto"] = "cpu"
    """Where ranks train. cuda: on the GPUs of their machine, shared out in turn. auto: there, if
    there is one. Tested on one GPU."""
    threads: int = 1
    """Threads of compute of a rank on the CPU."""
    start_seconds: float = 120.0
    """How long ranks wait at the start for one that has not arrived, from the last that has, before
    all end."""
    lost_after_seconds: float = 10.0
    """How long a rank may show no sign of life before the others continue without it for good, or,
    where they cannot, end."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of strategies and optimizers, by section: {"gossip": GossipConfig(every=2)}, or their
    values by name, {"gossip": {"every": 2}}. What is not given has its default."""
    checkpoint_every: int | None = None
    """Steps between checkpoints, in DIR/checkpoints, and one at the end or the stop: a run that has
    them can be resumed. None: none are saved."""
    keep_checkpoints: int = 2
    """How many checkpoints stay, of those that all ranks have saved."""
    run_name: str | None = None
    """Name of the run, which its checkpoints hold: those of another one are refused. None: drawn
    at random."""
    resume: Path | None = None
    """Continue the run of this folder, from its newest checkpoint and with its options. Others
    may be given for how far it goes, and for what changes no figure."""
    resume_step: int | None = None
    """Resume from the checkpoint of this step, and remove those after it; None: the newest."""
    evaluate_every: int | None = None
    """Evaluate after so many steps, too; None: at the end of each epoch alone."""
    keep_best: Literal["highest", "lowest"] | None = None
    """Keep the model of the evaluation with the highest (or lowest) metric, too, in
    DIR/best.safetensors. None: the last one alone."""
    log_every: int = 10
    """Steps between two lines of the metrics files."""
    trace: int = 50
    """Steps whose spans go into trace.json; 0: no trace."""
    apoptosis: float | None = None
    """Let hidden neurons be merged into others during training, and take at most this share
    of the variance of each layer's pre-activations for it, such as 0.01. None: widths stay."""
    tensorboard: bool = False
    """Write TensorBoard event files, too: a folder a rank under tensorboard/."""
    wandb: str | None = None
    """Weights & Biases project to log rank 0 to, too; None: none. WANDB_MODE=offline sends
    nothing."""
    quiet: bool = False
    """Show no progress."""

    def __post_init__(self) -> None:
        make_plain(self)
        check_fields(self)
        find(self.strategy)
        object.__setattr__(self, "options", check_options(self.options))
        check_at_least(
            self,
            1,
            *("epochs", "batch_size", "nproc", "log_every", "lr_step_epochs"),
            *(() if self.island == "node" else ("island",)),
            *("threads", "checkpoint_every", "keep_checkpoints"),
            *("max_steps", "accumulate", "evaluate_every"),
        )
        times = ("start_seconds",)
        counts = ("seed", "trace", "data_threads", "warmup_epochs")
        check_at_least(self, 0, "weight_decay", *counts, *times)
        check_rule(self, "finite", lambda value: value < math.inf, "weight_decay", *times)
        positive = ("lr", "lost_after_seconds", "clip_norm")
        check_rule(self, "above 0 and finite", lambda value: 0 < value < math.inf, *positive)
        shares = ("lr_gamma", "apoptosis")
        check_rule(self, "above 0 and below 1", lambda value: 0 < value < 1, *shares)
        check_rule(self, "a name", bool, "wandb", "run_name")
        if self.warmup_epochs >= self.epochs:
            raise ValueError(
                f"warmup_epochs is {self.warmup_epochs}, but must be below epochs, {self.epochs}: "
                "the schedule begins after it."
            )
        if self.lr_schedule == "step" and self._step_epochs <= self.warmup_epochs:
            raise ValueError(
                f"lr_step_epochs is {self._step_epochs}, but must be above warmup_epochs, "
                f"{self.warmup_epochs}: drops count from the start of the run, and the rate would "
                "fall as soon as it has risen. Warm up for fewer epochs, or drop later."
            )
        if self.apoptosis is not None and self.optimizer in SECOND_ORDER:
            raise ValueError(
                f"apoptosis is {self.apoptosis}, and the state of optimizer {self.optimizer} "
                "cannot shrink: use sgd, adamw or muon."
            )
        if self.island != 1 and not self.traits.has_islands:
            can = " or ".join(one.name for one in STRATEGIES.values() if one.has_islands)
            raise ValueError(
                f"island is {self.island}, and strategy {self.strategy} has no islands: use "
                f"--strategy {can}, or leave --island out."
            )
        if self.island != 1 and self.apoptosis is not None:
            raise ValueError(
                f"island is {self.island}, and layers of islands cannot shrink: leave --apoptosis "
                "or --island out."
            )
        if self.resume_step is not None and self.resume is None:
            raise ValueError(
                f"resume_step is {self.resume_step}, but no run is resumed: name its folder with "
                "--resume."
            )

    @property
    def island_size(self) -> int:
        """Ranks of an island; of a resolved configuration."""
        assert isinstance(self.island, int), "resolve the configuration first"
        return self.island

    @property
    def _step_epochs(self) -> int:
        return self.lr_step_epochs or math.ceil(self.epochs / 3)

    @property
    def step_samples(self) -> int:
        """Samples a step on each rank."""
        return self.batch_size * self.accumulate

    def total_steps(self, epoch_batches: int) -> int:
        """Steps of a rank in a run whose epochs have so many batches."""
        steps = self.epochs * epoch_batches
        return steps if self.max_steps is None else min(steps, self.max_steps)

    @property
    def traits(self) -> Strategy:
        """What is to know of the strategy."""
        return find(self.strategy)

    @property
    def strategy_options(self) -> Any:
        """The options of the strategy, None if it has none."""
        return self.options[self.traits.section] if self.traits.options_type else None

    @property
    def momentum(self) -> float:
        """That of optimizer sgd."""
        return self.options["sgd"].momentum

    def setting(
        self, world_size: int, *, total_steps: int = 0, has_own_optimizer: bool = False
    ) -> Setting:
        """What a strategy may know of the run; a job may have an optimizer that no option names."""
        island = self.island if isinstance(self.island, int) else 1
        given: dict[str, Any] = {"world_size": world_size // island, "total_steps": total_steps}
        given["island"] = island
        if has_own_optimizer:
            given |= {"optimizer": "the job's own", "momentum": 0.0}
        names = {field.name for field in dataclasses.fields(Setting)} - given.keys()
        return Setting(**given, **{name: getattr(self, name) for name in names})

    @property
    def needs_every_rank(self) -> bool:
        """Whether the run is over when a rank dies."""
        return self.traits.needs_every_rank

    def resolved(self, *, nproc: int, out: Path) -> "TrainConfig":
        """The same run with nothing left to a default."""
        lr = DEFAULT_LR[self.optimizer] if self.lr is None else self.lr
        step_epochs = self._step_epochs if self.lr_schedule == "step" else self.lr_step_epochs
        return dataclasses.replace(self, nproc=nproc, out=out, lr=lr, lr_step_epochs=step_epochs)

    @property
    def peak_lr(self) -> float:
        """The rate that the schedule starts from; of a resolved configuration.

        Each rank keeps its batch size, so p ranks learn from p times the samples a step.
        GossipGraD's code leaves the rate as it is (none); linear is that of Goyal et al.,
        arXiv:1706.02677, section 2.
        """
        assert self.lr is not None, "resolve the configuration first"
        assert self.nproc is not None
        sharing_ranks = self.nproc if self.traits.communicates else 1
        return self.lr * sharing_ranks ** {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[self.lr_rule]

    def lr_factor(self, step: int, *, steps_per_epoch: int) -> float:
        """The share of `peak_lr` in a step, counted from 0."""
        warmup = self.warmup_epochs * steps_per_epoch
        if step < warmup:
            return (step + 1) / warmup
        if self.lr_schedule == "constant":
            return 1.0
        if self.lr_schedule == "step":
            return self.lr_gamma ** (step // steps_per_epoch // self._step_epochs)
        # In mode stale the last rounds of a run may lie beyond it.
        steps = self.total_steps(steps_per_epoch)
        done = min(1.0, (step - warmup) / (steps - warmup)) if steps > warmup else 1.0
        return 1 - done if self.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))

    def _unused(self) -> list[tuple[str, str, str]]:
        """Options that others leave without use: the section, the name, and why."""
        strategy, schedule = f"strategy is {self.strategy}", f"lr_schedule is {self.lr_schedule}"
        own = sections_of(strategy=self.strategy, optimizer=self.optimizer)
        unused: list[tuple[str, str, str]] = []
        for section, kind in options_by_section().items():
            owner = f"optimizer is {self.optimizer}" if section in SECTIONS else strategy
            why = {field.name: owner for field in dataclasses.fields(kind)}
            if section in SECTIONS and section in own:
                why = {}
            elif section in own:
                setting = self.setting(self.nproc or 0)
                is_of_strategy = section == self.traits.section
                why = self.traits.unused(self.strategy_options, setting) if is_of_strategy else {}
            unused += [(section, name, reason) for name, reason in why.items()]
        if not self.traits.communicates:
            unused.append(("", "lr_rule", strategy))
        if self.job is not None:
            names = ("data", "model", "data_dir")
            unused += [("", name, f"job is {self.job}") for name in names]
        elif self.data == "digits":
            unused.append(("", "data_dir", "data is digits, a part of the package"))
        if self.checkpoint_every is None:
            unused.append(("", "keep_checkpoints", "there are none without checkpoint_every"))
        if self.lr_schedule != "step":
            unused += [("", name, schedule) for name in ("lr_step_epochs", "lr_gamma")]
        if self.shuffle == "global":
            unused.append(("", "shards", "shuffle is global"))
        if self.shuffle == "ring":
            unused.append(("", "data_threads", "shuffle is ring, and rows lie in memory"))
        return unused

    def warn_of_unused(self) -> None:
        """Warn of options that differ from their defaults and that this run does not use."""
        for section, name, why in self._unused():
            owner = self.options[section] if section else self
            value = getattr(owner, name)
            if value != type(owner).__dataclass_fields__[name].default:
                warnings.warn(f"{name}={value} is not used: {why}.", stacklevel=2)
        if self.lr_schedule == "step" and self._step_epochs >= self.epochs:
            warnings.warn(
                f"lr_schedule is step, but the rate never drops: lr_step_epochs is "
                f"{self._step_epochs} and epochs is {self.epochs}. Make lr_step_epochs less.",
                stacklevel=2,
            )

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `config.json` holds them."""
        values = dataclasses.asdict(self)
        values |= values.pop("options")
        for name in _PATHS:
            if values[name] is not None:
                values[name] = str(values[name])
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "TrainConfig":
        """The configuration that `to_json` wrote.

        Raises:
            ValueError: A name is not known, or a value is not allowed.
        """
        values = dict(values)
        sections = values.keys() & options_by_section().keys()
        options = check_options({section: values.pop(section) for section in sections})
        for name in _PATHS:
            if isinstance(value := values.get(name), str):
                values[name] = Path(value)
        return cls(options=options, **from_plain(cls, values, "the configuration"))

    @classmethod
    def from_file(cls, path: Path, *, same_run: bool = False) -> "TrainConfig":
        """The configuration in a `config.json`, less what is of one start, such as its folder.

        Args:
            path: The file.
            same_run: Whether it is to be the same run: its name stays, too.

        Raises:
            ValueError: The file cannot be read, is no `config.json`, or holds an option that is not
                as it should be; the message names it.
        """
        try:
            values = json.loads(path.read_text())
        except OSError as error:
            raise ValueError(
                f"cannot read {path}: {error.strerror}; name the config.json of a run."
            ) from error
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}.") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path} is no config.json of a run: it holds no options.")
        for note in (*_NOTES, *_OF_A_START, *(() if same_run else _OF_A_RUN)):
            values.pop(note, None)
        try:
            return cls.from_json(values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error

    def text(self) -> str:
        """What `config.json` holds: options, which of them are not used, versions."""
        unused = [f"{section}.{name}".lstrip(".") for section, name, _ in self._unused()]
        values = self.traits.describe(self.strategy_options), unused, versions()
        return json.dumps({**self.to_json(), **dict(zip(_NOTES, values, strict=True))}, indent=2)

    def write(self, path: Path) -> None:
        """Write `config.json`, so that there is this one or that before, come what may."""
        write_whole(path, self.text() + "\n")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the figures."""
    found = {"python": platform.python_version()}
    for package in ("gossipgrad", "torch", "numpy", "safetensors"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
