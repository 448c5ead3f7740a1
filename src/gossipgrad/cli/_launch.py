"""`gossipgrad launch`: a user's own script on several workers, each of which may die alone."""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from gossipgrad.launch import SOME_LOST, Rendezvous, launch

_EXIT_CODES = f"""\
exit codes, of the workers that this command started:
  0    all succeeded
  1    all failed
  2    the command cannot work as it was given; nothing was started
  {SOME_LOST}    some failed, and the others succeeded
  130  stopped by Ctrl-C (143: by SIGTERM, 129: by SIGHUP)

A worker that fails is named in one line, and the others continue. Ctrl-C or SIGTERM is passed on to
all workers; those that still run after --grace-seconds are killed, and so are all if another one
comes more than a second later.

Across machines, start the same command on each, with its --node-rank:
  gossipgrad launch --nodes 2 --node-rank 0 --rendezvous 10.0.0.1:29500 --nproc 4 script.py
  gossipgrad launch --nodes 2 --node-rank 1 --rendezvous 10.0.0.1:29500 --nproc 4 script.py
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # pyrefly: ignore[bad-override]
        raise ValueError(f"{message}; see `gossipgrad launch --help`")


def main(arguments: list[str], *, prefix: bool = True) -> int:
    """Start the workers, wait for them; returns the exit code.

    Args:
        arguments: The command line.
        prefix: Begin each line of several workers with its rank, if there is no --log-dir.

    Raises:
        ValueError: An argument is wrong; nothing was started.
        GossipError: A launcher of another node does not come, or a process cannot be started.
    """
    options = _parser().parse_args(arguments)
    nodes, node_rank = options.nodes, options.node_rank
    if not 0 <= node_rank < nodes:
        raise ValueError(
            f"--node-rank is {node_rank}, but must be from 0 to {nodes - 1} with --nodes {nodes}."
        )
    if nodes > 1 and options.rendezvous is None:
        raise ValueError(
            f"--nodes is {nodes}, but there is no --rendezvous: give the address of node 0 and a "
            "free port there, such as 10.0.0.1:29500, the same on all nodes."
        )
    command, log_dir = _command(options), options.log_dir
    if log_dir is not None:
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
            for log in log_dir.glob("rank*.log"):
                log.unlink()
        except OSError as error:
            raise ValueError(
                f"cannot write to --log-dir {log_dir} ({error.strerror}): name another folder."
            ) from error
    with Rendezvous(
        options.nproc,
        nodes=nodes,
        node_rank=node_rank,
        address=options.rendezvous,
        timeout_seconds=options.rendezvous_seconds,
    ) as rendezvous:
        launched = launch(
            command,
            rendezvous,
            grace_seconds=options.grace_seconds,
            prefix=prefix and rendezvous.world_size > 1,
            log_dir=log_dir,
            respawn=options.respawn,
            island=options.island,
        )
        if launched.stopped_by is not None:
            print(f"gossipgrad: stopped by {launched.stopped_by.name}", file=sys.stderr)
            rendezvous.close(wait=False)
    return launched.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="gossipgrad launch",
        description="Start a script on several workers, as torchrun does, but let survivors live.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nproc", "--nproc-per-node", "--nproc_per_node", type=_nproc, required=True, metavar="N",
        help="workers to start on this machine; gpu: one for each of its GPUs")  # fmt: skip
    add("--nodes", "--nnodes", type=_count, default=1, metavar="N",
        help="machines, each with a launcher of its own (1)")  # fmt: skip
    add("--node-rank", "--node_rank", type=int, default=0, metavar="R",
        help="which of them this is, from 0")  # fmt: skip
    add("--rendezvous", type=_address, metavar="HOST:PORT",
        help="where the store of all nodes is, on node 0 (a free port of loopback)")  # fmt: skip
    add("--rendezvous-seconds", type=_seconds, default=600.0, metavar="S",
        help="how long to wait for the other nodes (600)")  # fmt: skip
    add("--grace-seconds", type=_seconds, default=30.0, metavar="S",
        help="from Ctrl-C to the end of workers that still run (30)")  # fmt: skip
    add("--log-dir", "--log_dir", type=Path, metavar="DIR",
        help="write what workers print to DIR/rankN.log; else each line has its rank")  # fmt: skip
    add("--respawn", type=_natural, default=0, metavar="N",
        help="start workers that fail again, N times in all, while others run: the script joins by "
             "gg.join if TORCHELASTIC_RESTART_COUNT is not 0 (0)")  # fmt: skip
    add("--island", type=_count, default=1, metavar="N",
        help="workers that share a replica, and end and start together (1)")  # fmt: skip
    add("-m", "--module", action="store_true", help="the script is a module, as python -m has it")
    add("script", help="the script, or module, to run")
    add("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _command(options: argparse.Namespace) -> list[str]:
    start = [sys.executable, "-u"]
    if not options.module:
        if not Path(options.script).is_file():
            raise ValueError(f"there is no script {options.script}; for a module add -m.")
        return [*start, options.script, *options.arguments]
    sys.path.insert(0, str(Path.cwd()))  # where python -m looks first
    try:
        found = find_spec(options.script.partition(".")[0])
    except ValueError:
        found = None
    if found is None:
        raise ValueError(f"there is no module {options.script}; for a script leave -m out.")
    return [*start, "-m", options.script, *options.arguments]


def _nproc(text: str) -> int:
    if text != "gpu":
        return _count(text)
    import torch

    if not (gpus := torch.cuda.device_count()):
        raise argparse.ArgumentTypeError("gpu, but this machine has none that torch can use")
    return gpus


def _natural(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, at least 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds, at least 0")
    return value


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be HOST:PORT, such as 10.0.0.1:29500 or [fd00::1]:29500"
        )
    return host.strip("[]"), int(port)
