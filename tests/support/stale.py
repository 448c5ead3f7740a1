"""Sessions of mode stale in one thread, over links on which a test says what arrives when."""

from collections.abc import Callable, Sequence

from torch import nn

import gossipgrad as gg
from gossipgrad.comm import Group, Header, Kind
from gossipgrad.decentralized._reference_stale import StaleReference
from support.ranks import run_ranks
from support.replicas import OptimizerFactory, network, set_gradients, sgd
from support.wires import Wires

__all__ = ["Scripted", "StaleScript", "reference"]

# Steps of ranks, `("step", r)`, and deliveries of all that s has sent to r, `("deliver", s, r)`.
StaleScript = Sequence[tuple]


class Scripted:
    """Ranks that have begun a session, and are stepped and heard when a script says so."""

    def __init__(
        self,
        world_size: int,
        *,
        optimizer: OptimizerFactory = sgd,
        make: Callable[[], nn.Module] = network,
        first: Callable[["Scripted", gg.GossipSession], None] = lambda scripted, session: None,
        **settings,
    ) -> None:
        """`first` is done by all ranks at once, each in a thread: there may be collectives.

        No time passes, nor any lease: by default nobody watches over the others.
        """
        self.wires = Wires(world_size)
        self.models: list[nn.Module] = [make() for _ in range(world_size)]
        self.steps = [0] * world_size
        self.optimizers = [optimizer(list(model.parameters())) for model in self.models]
        settings.setdefault("bucket_bytes", 1 << 20)  # one message a round and section
        settings.setdefault("heartbeats", None)

        def begin(rank: int, group: Group) -> gg.GossipSession:
            session = gg.gossip(
                self.models[rank],
                self.optimizers[rank],
                process_group=group,
                transport=lambda group: self.wires.transport(group.rank),
                **settings,
            )
            first(self, session)
            return session

        self.sessions = run_ranks(world_size, begin)

    def run(self, script: StaleScript, gradients=set_gradients) -> None:
        for what, *ranks in script:
            if what == "deliver":
                self.deliver(*ranks)
            else:
                self.step(*ranks, gradients=gradients)

    def step(self, rank: int, gradients=set_gradients) -> None:
        gradients(self.models[rank], rank, self.steps[rank])
        self.optimizers[rank].step()
        self.steps[rank] += 1

    def deliver(self, sender: int, receiver: int) -> None:
        self.wires.deliver(sender, receiver, 1 << 30)

    def late_by(self, rounds: int, steps: int, gradients=set_gradients) -> None:
        """All ranks step together, and each part is mixed `rounds` rounds after it could be."""
        start = max(self.steps)
        for step in range(start, start + steps):
            arrives = True
            while arrives:  # READY, and then the part
                arrives = False
                for link, queue in self.wires.under_way.items():
                    while queue and self._is_due(queue[0], step - rounds):
                        self.wires.deliver(*link)
                        arrives = True
                for session in self.sessions:
                    session._rounds.channel.poll()
            for rank in range(len(self.models)):
                self.step(rank, gradients)

    def _is_due(self, message, last_round: int) -> bool:
        header = Header.unpack(message.header)
        return header.kind is Kind.READY or header.round <= last_round

    def drain(self) -> None:
        """Brings everything everywhere, and lets every rank mix what there is."""
        is_moving = True
        while is_moving:  # a part leaves when a rank has read that the other end is ready
            for session in self.sessions:
                session._rounds.channel.poll()
            is_moving = any(self.wires.under_way.values())
            self.wires.deliver_all()
        for session in self.sessions:
            session._rounds.drain(0.0)

    def close(self) -> None:
        for session in self.sessions:
            session.__exit__(RuntimeError, None, None)  # waits for nobody


def reference(
    world_size: int,
    script: StaleScript,
    schedule: gg.topology.Schedule,
    *,
    optimizer: OptimizerFactory = sgd,
    make: Callable[[], nn.Module] = network,
    gradients=set_gradients,
    settle: bool = False,
    **settings,
) -> StaleReference:
    """What the reference comes to by the same script."""
    models = [make() for _ in range(world_size)]
    theirs = StaleReference(
        models, [optimizer(list(m.parameters())) for m in models], schedule, **settings
    )
    steps = [0] * world_size
    for what, *ranks in script:
        if what == "deliver":
            theirs.deliver(*ranks)
        else:
            (rank,) = ranks
            gradients(models[rank], rank, steps[rank])
            theirs.step(rank)
            steps[rank] += 1
    if settle:
        theirs.settle()
    return theirs
