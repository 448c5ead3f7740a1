"""The profile of a model's step on a device: times and sizes by parameter."""

import json
import math
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

__all__ = ["PROFILES", "Profile"]

PROFILES = ("resnet50", "googlenet", "vgg16", "lstm", "gpt2")

_FORMAT = "gossipgrad profile"
_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """The compute of one training step: forward, backward by parameter, optimizer.

    `names`, `elements` and `backward_seconds` have one entry per parameter, in the order in which
    backward finishes their gradients.

    Attributes:
        name: Name of the model.
        device: Its device, for example `"P100"`.
        source: The rule it was derived by, or `"recorded"` and how.
        batch_size: Samples in the step.
        forward_seconds: From the start of the step to the loss.
        optimizer_seconds: The update of all parameters.
        names: Names of the parameters.
        elements: Number of elements of each parameter.
        backward_seconds: From the moment that the previous gradient was ready (for the first, from
            the start of backward) until this one is.
        element_bytes: Bytes of an element, the same for all parameters.
        state_copies: Tensors of optimizer state for each parameter: 1 for momentum, 2 for Adam.

    Raises:
        ValueError: A time is negative or not finite, a size is no whole number of 1 or more, the
            tuples differ in length, or nothing takes any time.

    Example:
        >>> profile = Profile(
        ...     name="two layers", device="none", source="made up", batch_size=8,
        ...     forward_seconds=0.25, optimizer_seconds=0.125, names=("last", "first"),
        ...     elements=(10, 1000), backward_seconds=(0.125, 0.5),
        ... )
        >>> profile.compute_seconds, profile.size_bytes
        (1.0, 4040)
    """

    name: str
    device: str
    source: str
    batch_size: int
    forward_seconds: float
    optimizer_seconds: float
    names: tuple[str, ...]
    elements: tuple[int, ...]
    backward_seconds: tuple[float, ...]
    element_bytes: int = 4
    state_copies: int = 1

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a profile needs a name: say which model it is of")
        if not len(self.names) == len(self.elements) == len(self.backward_seconds) > 0:
            raise ValueError(
                f"profile {self.name!r} has {len(self.names)} names, {len(self.elements)} elements "
                f"and {len(self.backward_seconds)} backward_seconds: give one of each a parameter, "
                "for one parameter or more"
            )
        wholes = {"batch_size": self.batch_size, "element_bytes": self.element_bytes}
        wholes |= {
            f"elements of {n!r}": of for n, of in zip(self.names, self.elements, strict=True)
        }
        for what, value in wholes.items():
            if type(value) is not int or value < 1:
                raise ValueError(f"{what} must be a whole number, at least 1, got {value!r}")
        if type(self.state_copies) is not int or self.state_copies < 0:
            raise ValueError(f"state_copies must be 0 or more tensors, got {self.state_copies!r}")
        if not all(isinstance(name, str) for name in self.names):
            raise ValueError(f"profile {self.name!r} has {self.names!r}: names are strings")
        for seconds in (self.forward_seconds, self.optimizer_seconds, *self.backward_seconds):
            if not 0 <= seconds < math.inf:
                raise ValueError(f"profile {self.name!r} has a time of {seconds!r}: give 0 or more")
        if not self.compute_seconds > 0:
            raise ValueError(f"profile {self.name!r} takes no time at all: record it again")

    @property
    def compute_seconds(self) -> float:
        """Time of a step of one worker without communication: forward, backward and optimizer."""
        return self.forward_seconds + math.fsum(self.backward_seconds) + self.optimizer_seconds

    @property
    def size_bytes(self) -> int:
        """Bytes of all parameters or all gradients."""
        return sum(self.elements) * self.element_bytes

    def scaled(self, *, time: float = 1.0, size: float = 1.0) -> "Profile":
        """Return the profile with all times scaled by `time` and all elements by `size`.

        Each parameter keeps at least one element. The source names the factors.

        Raises:
            ValueError: A factor is not positive and finite.
        """
        for what, factor in (("time", time), ("size", size)):
            if not 0 < factor < math.inf:
                raise ValueError(f"{what} must be a positive factor, got {factor!r}")
        if time == size == 1:
            return self
        return replace(
            self,
            source=f"{self.source}; scaled: times by {time:g}, sizes by {size:g}",
            forward_seconds=self.forward_seconds * time,
            optimizer_seconds=self.optimizer_seconds * time,
            backward_seconds=tuple(seconds * time for seconds in self.backward_seconds),
            elements=tuple(max(1, round(count * size)) for count in self.elements),
        )

    @classmethod
    def of_size(cls, parameters: int, compute_seconds: float) -> "Profile":
        """Create the profile of a model of which only its size and the time of a step are known.

        It has up to 100 equal float32 tensors. Forward takes a third of the time, backward the
        rest, and the update is counted with it.

        Args:
            parameters: How many numbers are trained.
            compute_seconds: Of a step of one worker without communication.

        Raises:
            ValueError: There is no parameter, or the time is not above 0.

        Example:
            >>> Profile.of_size(124_000_000, 0.3).size_bytes
            496000000
        """
        if not 0 < compute_seconds < math.inf:
            raise ValueError(f"compute_seconds is {compute_seconds!r}: a step takes some time")
        if parameters < 1:
            raise ValueError(f"parameters is {parameters!r}: a model has 1 or more")
        tensors = min(100, parameters)
        whole, rest = divmod(parameters, tensors)
        return cls(
            name="a model",
            device="any device",
            source="equal tensors, by the size of the model and the time of a step",
            batch_size=1,
            forward_seconds=compute_seconds / 3,
            optimizer_seconds=0.0,
            names=tuple(f"part{index}" for index in range(tensors)),
            elements=tuple(whole + (index < rest) for index in range(tensors)),
            backward_seconds=(compute_seconds * 2 / 3 / tensors,) * tensors,
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `from_json`, a parameter as name, elements and seconds."""
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "name": self.name,
            "device": self.device,
            "source": self.source,
            "batch_size": self.batch_size,
            "element_bytes": self.element_bytes,
            "state_copies": self.state_copies,
            "forward_seconds": self.forward_seconds,
            "optimizer_seconds": self.optimizer_seconds,
            "parameters": [
                list(row)
                for row in zip(self.names, self.elements, self.backward_seconds, strict=True)
            ],
        }

    @classmethod
    def from_json(cls, value: object) -> "Profile":
        """Create the profile from the result of `to_json`.

        Raises:
            ValueError: It is not a profile, or has another version.
        """
        if not isinstance(value, dict) or value.get("format") != _FORMAT:
            raise ValueError(
                f'not a profile: it has no "format": "{_FORMAT}". Profile.to_json() makes one'
            )
        if value.get("version") != _VERSION:
            raise ValueError(
                f"a profile of version {value.get('version')!r}, this reads version {_VERSION}: "
                "record it again"
            )
        rest = {k: v for k, v in value.items() if k not in ("format", "version", "parameters")}
        try:
            names, elements, seconds = zip(*value["parameters"], strict=True)
            for what in ("forward_seconds", "optimizer_seconds"):
                rest[what] = float(rest[what])  # JSON has one kind of number: 1 means 1.0
            seconds = tuple(map(float, seconds))
            return cls(names=names, elements=elements, backward_seconds=seconds, **rest)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"a profile with keys {sorted(map(str, value))} that cannot be read ({error!r}): "
                "parameters must be a list of [name, elements, backward seconds]"
            ) from error

    @classmethod
    def load(cls, name_or_path: str | Path) -> "Profile":
        """Load one of `PROFILES` by its name, or a file that holds what `to_json` gave.

        Raises:
            ValueError: There is neither such a name nor such a file, or the file has no profile.

        Example:
            >>> round(Profile.load("resnet50").size_bytes / 1e6)
            102
        """
        if name_or_path in PROFILES:
            source = files("gossipgrad.planning") / "profiles" / f"{name_or_path}.json"
            text = source.read_text(encoding="utf-8")
        else:
            try:
                text = Path(name_or_path).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                why = error.strerror if isinstance(error, OSError) else error
                raise ValueError(
                    f"no profile {str(name_or_path)!r} ({why}): give one of "
                    f"{', '.join(PROFILES)}, or a file of Profile.to_json()"
                ) from error
        try:
            return cls.from_json(json.loads(text))
        except ValueError as error:  # of JSON, too
            raise ValueError(f"{str(name_or_path)!r}: {error}") from error
