"""`gossipgrad plan` as the tests run it, and a profile to run it with."""

import json

from gossipgrad import cli
from gossipgrad.planning import Profile

__all__ = ["SMALL", "found", "run", "written"]

SMALL = Profile(
    name="small",
    device="none",
    source="made up",
    batch_size=8,
    forward_seconds=0.01,
    optimizer_seconds=0.001,
    names=("c.weight", "b.weight", "a.bias", "a.weight"),
    elements=(1_000_000, 10_000, 100, 3_000_000),
    backward_seconds=(0.01, 0.01, 0.0, 0.02),
)


def written(folder, **changes):
    """The path of a file with that profile, and these keys changed."""
    path = folder / "small.json"
    path.write_text(json.dumps(SMALL.to_json() | changes))
    return str(path)


def run(profile, *options):
    """The exit code for 4 ranks."""
    return cli.main(["plan", "--profile", profile, "--workers", "4", *options])


def found(capsys, profile, *options):
    """What `--json` prints."""
    assert run(profile, "--json", *options) == 0
    return json.loads(capsys.readouterr().out)
