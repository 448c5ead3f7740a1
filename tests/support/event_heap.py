"""The time model once more, the slow and plain way: one event at a time, one rank at a time.

Every rank is a generator that yields what it waits for: a moment, or a box that something is put
into. Every sender's link is another, which takes messages in the order in which they were posted.
Ring all-reduces are made of their hops, where one at a time is under way.
"""

import heapq
from collections import defaultdict
from itertools import count

from gossipgrad.simulate._model import by_layer, by_size
from gossipgrad.simulate._model import count_messages as pieces


class Clock:
    """Events in the order of their times."""

    def __init__(self):
        self.now = 0.0
        self._heap = []
        self._order = count()
        self._boxes = defaultdict(list)
        self._waiting = defaultdict(list)

    def start(self, process):
        self._resume(process)

    def put(self, box, seconds_from_now=0.0):
        heapq.heappush(self._heap, (self.now + seconds_from_now, next(self._order), "put", box))

    def run(self):
        while self._heap:
            self.now, _, kind, what = heapq.heappop(self._heap)
            if kind == "put":
                self._boxes[what].append(self.now)
                for process in self._waiting.pop(what, []):
                    self._resume(process)
            else:
                self._resume(what)

    def _resume(self, process):
        for wanted in process:
            if isinstance(wanted, float):
                if wanted > self.now:
                    heapq.heappush(self._heap, (wanted, next(self._order), "go", process))
                    return
            elif not self._boxes[wanted]:
                self._waiting[wanted].append(process)
                return


class Run:
    """So many steps of a strategy; `ends[step][rank]`."""

    def __init__(self, profile, network, world_size, workers, steps):
        self.profile, self.network, self.p, self.steps = profile, network, world_size, steps
        self.clock = Clock()
        constant = workers.constant(world_size)
        self.paces = [workers.pace(constant, number) for number in range(steps)]
        self.ends = [[None] * world_size for _ in range(steps)]

    def seconds(self, rank, number, alone):
        pace = self.paces[number]
        return float(pace.stall_seconds[rank] + alone * pace.factor[rank])

    def go(self, ranks, links=()):
        for process in (*links, *ranks):
            self.clock.start(process)
        self.clock.run()
        assert all(end is not None for row in self.ends for end in row), "a rank hangs"
        return self.ends

    def cost(self, a, b):
        pair = self.network.links.get((a, b)) or self.network.links.get((b, a))
        cost = pair or self.network.exchange
        slow = max(self.network.slow_hosts.get(a, 1.0), self.network.slow_hosts.get(b, 1.0))
        return cost.alpha_seconds, cost.beta_seconds_per_byte * slow


def gossip(run, options, schedule):
    profile, network, clock = run.profile, run.network, run.clock
    width = options.element_bytes or profile.element_bytes
    sizes = [n * width for n in profile.elements]
    messages = pieces(sizes, options.bucket_bytes)
    message = sum(sizes) / messages
    exact = pieces([n * profile.element_bytes for n in profile.elements], options.bucket_bytes)
    posted = defaultdict(list)

    given = options.state_copies
    copies = profile.state_copies if given is None else given
    averaged = exact * (1 + (copies if options.state_every else 0))

    def messages_of(round):
        due = options.state_every and round % options.state_every == 0
        return messages * (1 + (copies if due else 0))

    def link(rank):
        for number in count():
            yield ("posted", rank, number)
            round, bucket, to = posted[rank][number]
            alpha, beta = run.cost(rank, to)
            yield clock.now + message * beta
            clock.put(("part", to, round, bucket), alpha)
            if bucket == messages_of(round) - 1:
                clock.put(("left", rank, round))

    def copy(rank, round, sent):
        to = schedule.peers(round, rank).send_to
        if to is None:
            return
        if len(sent) >= 2:
            yield ("left", rank, sent[-2])
        sent.append(round)
        for bucket in range(messages_of(round)):
            yield clock.now + network.snapshot_seconds_per_byte * message
            posted[rank].append((round, bucket, to))
            clock.put(("posted", rank, len(posted[rank]) - 1))

    def mix(rank, round, first, last):
        if schedule.peers(round, rank).recv_from is None:
            return
        for bucket in range(first, last):
            yield ("part", rank, round, bucket)
            yield clock.now + network.mix_seconds_per_byte * message

    def read(rank, number, round):
        """A step of mode sync: each piece of the forward pass needs one message of weights."""
        pace = run.paces[number]
        factor = float(pace.factor[rank])
        yield clock.now + float(pace.stall_seconds[rank])
        for bucket in range(messages):
            yield from mix(rank, round, bucket, bucket + 1)
            yield clock.now + profile.forward_seconds / messages * factor
        yield clock.now + sum(profile.backward_seconds) * factor
        yield from mix(rank, round, messages, messages_of(round))
        yield clock.now + profile.optimizer_seconds * factor

    def process(rank):
        round, sent, open_round = 0, [], None
        for number in range(run.steps):
            if options.mode == "overlap" and number % options.every == 0:
                yield from copy(rank, round, sent)
            if open_round is None:
                yield clock.now + run.seconds(rank, number, profile.compute_seconds)
            else:
                yield from read(rank, number, open_round)
                open_round = None
            averages = options.average_every and (number + 1) % options.average_every == 0
            if (number + 1) % options.every == 0:
                if options.mode == "sync":
                    yield from copy(rank, round, sent)
                if options.mode == "overlap" or averages:
                    yield from mix(rank, round, 0, messages_of(round))
                else:
                    open_round = round
                round += 1
            if options.average_every and (number + 1) % options.average_every == 0:
                buckets = [profile.size_bytes / exact] * averaged
                yield from average(run, rank, number, buckets)
            run.ends[number][rank] = clock.now

    p = range(run.p)
    return run.go([process(rank) for rank in p], [link(rank) for rank in p])


def ring(run, rank, key, size):
    """One ring all-reduce: every hop needs what the one before has brought, and a free link."""
    clock, p = run.clock, run.p
    alpha, beta = run.cost(rank, (rank + 1) % p)
    for hop in range(2 * (p - 1)):
        seconds = alpha + beta * size / p
        clock.put((*key, (rank + 1) % p, hop), seconds)
        yield clock.now + seconds
        yield (*key, rank, hop)


def average(run, rank, number, buckets):
    """All wait for all; then two all-gathers of next to nothing, then the buckets."""
    clock, p = run.clock, run.p
    for other in range(p):
        clock.put(("here", number, other, rank))
    for other in range(p):
        yield ("here", number, rank, other)
    yield clock.now + 2 * (p - 1) * run.network.exchange.alpha_seconds
    for bucket, size in enumerate(buckets):
        yield from ring(run, rank, ("average", number, bucket), size)


def all_reduce(run, options):
    profile, clock = run.profile, run.clock
    width = options.element_bytes or profile.element_bytes
    if options.buckets == "layer":
        dealt = by_layer(profile.names)
    else:
        sizes = [n * profile.element_bytes for n in profile.elements]
        dealt = by_size(sizes, options.bucket_bytes, 1 << 20)

    def communicate(rank):
        for number in range(run.steps):
            for bucket, places in enumerate(dealt):
                yield ("ready", rank, number, bucket)
                size = width * sum(profile.elements[place] for place in places)
                yield from ring(run, rank, ("ring", number, bucket), size)
            clock.put(("reduced", rank, number))

    queue = [(number, bucket) for number in range(run.steps) for bucket in range(len(dealt))]
    link = []  # who has it, and who waits for it behind

    def worker():
        """Takes one all-reduce after the other, of all ranks; the link is for one at a time."""
        alpha, beta = run.cost(0, 1) if run.p > 1 else (0.0, 0.0)
        hops = 2 * (run.p - 1)
        while queue:
            number, bucket = queue.pop(0)
            for rank in range(run.p):
                yield ("ready", rank, number, bucket)
            yield clock.now + hops * alpha
            link.append((number, bucket))
            if link[0] != (number, bucket):
                yield ("turn", number, bucket)
            size = width * sum(profile.elements[place] for place in dealt[bucket])
            yield clock.now + hops * beta * size / run.p
            link.pop(0)
            if link:
                clock.put(("turn", *link[0]))
            clock.put(("through", number, bucket))

    def gather(rank):
        for number in range(run.steps):
            for bucket in range(len(dealt)):
                yield ("through", number, bucket)
            clock.put(("reduced", rank, number))

    def process(rank):
        for number in range(run.steps):
            begun = clock.now
            done = profile.forward_seconds
            ready = {places[-1]: bucket for bucket, places in enumerate(dealt)}
            for place, seconds in enumerate(profile.backward_seconds):
                done += seconds
                yield begun + run.seconds(rank, number, done)
                if place in ready:
                    clock.put(("ready", rank, number, ready[place]))
            yield ("reduced", rank, number)
            factor = float(run.paces[number].factor[rank])
            yield clock.now + factor * profile.optimizer_seconds
            run.ends[number][rank] = clock.now

    p = range(run.p)
    if options.at_once == 1:
        moving = [communicate(rank) for rank in p]
    else:
        moving = [*(worker() for _ in range(options.at_once)), *(gather(rank) for rank in p)]
    return run.go([process(rank) for rank in p], moving)


def periodic(run, every, buckets):
    def process(rank):
        for number in range(run.steps):
            yield run.clock.now + run.seconds(rank, number, run.profile.compute_seconds)
            if (number + 1) % every == 0:
                yield from average(run, rank, number, buckets)
            run.ends[number][rank] = run.clock.now

    return run.go([process(rank) for rank in range(run.p)])
