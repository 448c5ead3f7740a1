"""An invitation: all that a newcomer needs to know of a run, as text."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from gossipgrad.comm import Heartbeats
from gossipgrad.decentralized._compress import name_of, resolve_compress
from gossipgrad.decentralized._modes import Mode, Overlap, Stale, Sync
from gossipgrad.decentralized._settings import Payload, Settings, Weights, WeightsAndState
from gossipgrad.topology import by_name

__all__ = ["Invitation", "settings_of"]

_FORMAT = "gossipgrad invitation 1"
_MODES: dict[str, type[Mode]] = {kind.__name__: kind for kind in (Overlap, Sync, Stale)}
_PAYLOADS: dict[str, type[Payload]] = {kind.__name__: kind for kind in (Weights, WeightsAndState)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Invitation:
    """What `GossipSession.invitation` tells those who would join; not secret.

    Attributes:
        host: Where the rendezvous store is.
        port: Its port.
        prefix: Of the run's keys in the store.
        name: Of its membership.
        where: The host that told this, and its network.
        world_size: How many ranks took part at the start.
        settings: Those of the session, as plain values.
        heartbeats: How its ranks watch over each other.
        fingerprint: What is trained, and how; see `fingerprint`.
        occasion: What introductions are good for.
        introductions: Of those ranks that were known when this was told.
    """

    host: str
    port: int
    prefix: str
    name: str
    where: str
    world_size: int
    settings: dict[str, Any]
    heartbeats: dict[str, float]
    fingerprint: dict[str, str]
    occasion: str
    introductions: dict[int, list[Any]]

    @property
    def encrypt(self) -> bool:
        """Whether links are encrypted."""
        return any(encrypt for _, _, encrypt, _ in self.introductions.values())

    def to_text(self) -> str:
        """As JSON."""
        return json.dumps({"format": _FORMAT, **asdict(self)})

    @classmethod
    def from_text(cls, text: str) -> "Invitation":
        """What `to_text` wrote.

        Raises:
            ValueError: It is something else, or of another version.
        """
        try:
            told: dict[str, Any] = json.loads(text)
            found = told.pop("format")
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(
                "this is no invitation: give what session.invitation() returned on a rank"
            ) from None
        if found != _FORMAT:
            raise ValueError(
                f"the invitation is of another version ({found!r}, here {_FORMAT!r}): install the "
                "run's version of gossipgrad"
            )
        try:
            told["introductions"] = {int(r): list(i) for r, i in told["introductions"].items()}
            return cls(**{field.name: told[field.name] for field in fields(cls)})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"the invitation is damaged: {error!r}") from error

    def to_settings(self) -> tuple[Settings, Heartbeats]:
        """The settings that the run has.

        Raises:
            ValueError: They cannot be.
        """
        told = self.settings
        try:
            topology, mode, payload = told["topology"], told["mode"], told["payload"]
            settings = Settings(
                schedule=by_name(
                    topology["name"],
                    self.world_size,
                    seed=topology["seed"] or 0,
                    rotate=topology["rotate"],
                ),
                mode=_made(_MODES, mode),
                payload=_made(_PAYLOADS, payload),
                every=told["every"],
                average_every=told["average_every"],
                wire_dtype=None
                if told["wire_dtype"] is None
                else getattr(torch, told["wire_dtype"]),
                bucket_bytes=told["bucket_bytes"],
                compress=resolve_compress(told.get("compress")),
                seed=told.get("seed", 0),
            )
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"the invitation is damaged: {error!r}") from error
        return settings, Heartbeats(**self.heartbeats)


def settings_of(settings: Settings) -> dict[str, Any]:
    """Settings as plain values; those that a newcomer can have.

    Raises:
        ValueError: It cannot, and why.
    """
    schedule, mode, payload = settings.schedule, settings.mode, settings.payload
    topology = schedule.describe()
    if set(topology) != {"name", "world_size", "rotate", "seed"}:
        raise ValueError(
            f"the schedule {topology['name']} was given for {schedule.world_size} ranks, and says "
            "nothing of more: use a topology by its name, such as topology='matching'"
        )
    if type(payload).__name__ not in _PAYLOADS:
        raise ValueError(
            f"payload {payload} sends gradients during backward, at rounds that one who joins "
            "does not know yet: use payload='weights'"
        )
    if isinstance(mode, Stale) and mode.replay is not None:
        raise ValueError("a run that replays a log repeats what was, and nobody joined there")
    return {
        "topology": topology,
        "mode": {"kind": type(mode).__name__, **_fields_of(mode, but="replay")},
        "payload": {"kind": type(payload).__name__, **_fields_of(payload)},
        "every": settings.every,
        "average_every": settings.average_every,
        "wire_dtype": None
        if settings.wire_dtype is None
        else str(settings.wire_dtype).removeprefix("torch."),
        "bucket_bytes": settings.bucket_bytes,
        "compress": None if settings.compress is None else name_of(settings.compress),
        "seed": settings.seed,
    }


def _made(kinds: Mapping[str, Any], told: Mapping[str, Any]) -> Any:
    return kinds[told["kind"]](**{name: v for name, v in told.items() if name != "kind"})


def _fields_of(value: Any, *, but: str = "") -> Mapping[str, Any]:
    return {f.name: getattr(value, f.name) for f in fields(value) if f.name != but}
