"""The time model once more, the slow and plain way: one event at a time, one rank at a time.

Every rank is a generator that yields what it waits for: a moment, or a box that something is put
into. Every sender's link is another, which takes messages in the order in which they were posted.
Ring all-reduces are made of their hops, where one at a time is under way.
"""

import heapq
from collections import defaultdict
from itertools import count

from gossipgrad.simulate._model import by_size
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
        return alone * float(self.paces[number][rank])

    def go(self, ranks, links=()):
        for process in (*links, *ranks):
            self.clock.start(process)
        self.clock.run()
        assert all(end is not None for row in self.ends for end in row), "a rank hangs"
        return self.ends


def gossip(run, options, schedule):
    profile, clock = run.profile, run.clock
    width = options.element_bytes or profile.element_bytes
    sizes = [n * width for n in profile.elements]
    messages = pieces(sizes, options.bucket_bytes)
    of_round = messages * (1 + options.state_copies)
    message = options.density * sum(sizes) / messages
    cost = run.network.exchange
    posted = defaultdict(list)

    def link(rank):
        for number in count():
            yield ("posted", rank, number)
            round, bucket, to = posted[rank][number]
            yield clock.now + message * cost.beta_seconds_per_byte
            clock.put(("part", to, round, bucket), cost.alpha_seconds)
            if bucket == of_round - 1:
                clock.put(("left", rank, round))

    def send(rank, round, sent):
        to = schedule.peers(round, rank).send_to
        if to is None:
            return
        if len(sent) >= 2:
            yield ("left", rank, sent[-2])
        sent.append(round)
        for bucket in range(of_round):
            posted[rank].append((round, bucket, to))
            clock.put(("posted", rank, len(posted[rank]) - 1))

    def receive(rank, round, first, last):
        if schedule.peers(round, rank).recv_from is None:
            return
        for bucket in range(first, last):
            yield ("part", rank, round, bucket)

    def read(rank, number, round):
        """A step of mode sync: each piece of the forward pass needs one message of weights."""
        for bucket in range(messages):
            yield from receive(rank, round, bucket, bucket + 1)
            yield clock.now + run.seconds(rank, number, profile.forward_seconds / messages)
        yield clock.now + run.seconds(rank, number, sum(profile.backward_seconds))
        yield from receive(rank, round, messages, of_round)
        yield clock.now + run.seconds(rank, number, profile.optimizer_seconds)

    def process(rank):
        round, sent, open_round = 0, [], None
        for number in range(run.steps):
            if options.mode == "overlap" and number % options.every == 0:
                yield from send(rank, round, sent)
            if open_round is None:
                yield clock.now + run.seconds(rank, number, profile.compute_seconds)
            else:
                yield from read(rank, number, open_round)
                open_round = None
            if (number + 1) % options.every == 0:
                if options.mode == "overlap":
                    yield from receive(rank, round, 0, of_round)
                    round += 1
                for again in range(options.exchanges if options.mode == "sync" else 0):
                    if again:
                        yield from receive(rank, round - 1, 0, of_round)
                    yield from send(rank, round, sent)
                    open_round = round
                    round += 1
            run.ends[number][rank] = clock.now

    p = range(run.p)
    return run.go([process(rank) for rank in p], [link(rank) for rank in p])


def ring(run, rank, key, size):
    """One ring all-reduce: every hop needs what the one before has brought, and a free link."""
    clock, p = run.clock, run.p
    for hop in range(2 * (p - 1)):
        seconds = run.network.exchange(size / p)
        clock.put((*key, (rank + 1) % p, hop), seconds)
        yield clock.now + seconds
        yield (*key, rank, hop)


def all_reduce(run, options):
    profile, clock = run.profile, run.clock
    width = options.element_bytes or profile.element_bytes
    sizes = [n * profile.element_bytes for n in profile.elements]
    buckets = by_size(sizes, options.bucket_bytes, options.first_bucket_bytes)

    def communicate(rank):
        for number in range(run.steps):
            for bucket, members in enumerate(buckets):
                yield ("ready", rank, number, bucket)
                size = width * sum(profile.elements[index] for index in members)
                yield from ring(run, rank, ("ring", number, bucket), size)
            clock.put(("reduced", rank, number))

    def process(rank):
        for number in range(run.steps):
            begun = clock.now
            done = profile.forward_seconds
            ready = {members[-1]: bucket for bucket, members in enumerate(buckets)}
            for index, seconds in enumerate(profile.backward_seconds):
                done += seconds
                yield begun + run.seconds(rank, number, done)
                if index in ready:
                    clock.put(("ready", rank, number, ready[index]))
            yield ("reduced", rank, number)
            yield clock.now + run.seconds(rank, number, profile.optimizer_seconds)
            run.ends[number][rank] = clock.now

    p = range(run.p)
    return run.go([process(rank) for rank in p], [communicate(rank) for rank in p])
