"""Is a program right? Do what it says, step by step, and look: the slow and obvious judge that the verifier must match.

Nothing here is shared with the verifier or with the dependency rule. A collective runs on whole numbers, each
contribution a digit of its own, so that a sum shows what went into it. A training step runs on the names of values; a
sum is a row of elements, each with the names of the gradients in it, so that it can be kept in parts. Ranks take turns
in random order, once with buffered and once with rendezvous sends.
"""

import math
import random
from collections import Counter, defaultdict

from microparallel.program import (
    Add,
    AllGather,
    AllReduce,
    Bucket,
    Collective,
    Free,
    Join,
    OptimizerStep,
    Parameters,
    Part,
    Recv,
    ReduceScatter,
    Send,
    Shard,
    Slices,
)


class Wrong(Exception):
    """The program does something that it must not, or does not achieve its goal."""


def judge(program, seed=0):
    """Say what is wrong with a program: nothing, `""`, when it is right."""
    try:
        for sends in ("buffered", "rendezvous"):
            World(program, sends).run(random.Random(seed))
    except Wrong as wrong:
        return str(wrong)
    return ""


def require(condition, reason):
    if not condition:
        raise Wrong(reason)


class World:
    """All ranks, what each still has to do, and the messages between them."""

    def __init__(self, program, sends):
        memory = Tensor if isinstance(program.goal, Collective) else Shelf
        self.program, self.sends = program, sends
        self.memories = [memory(program, rank) for rank in range(program.world_size)]
        self.to_do = [list(ops) for ops in program.ranks]
        self.sent = defaultdict(list)  # (sender, receiver) → all messages so far, as pairs of name and content
        self.received = defaultdict(int)  # (sender, receiver) → how many of them have been taken
        self.at_receive = set()  # ranks that have posted the receive they stand at

    def run(self, chance):
        ranks = list(range(self.program.world_size))
        while any(self.to_do):
            chance.shuffle(ranks)
            moved = [self.step(rank) for rank in ranks]
            require(any(moved), f"nobody can go on, with {self.sends} sends")
        for channel, messages in self.sent.items():
            require(self.received[channel] == len(messages), "a message is never received")
        for memory in self.memories:
            memory.check_end()
        if isinstance(self.memories[0], Shelf):
            check_training_step(self.program.goal, self.memories)
            check_parts(self.program, self.memories)

    def step(self, rank):
        """Let a rank do its next operation if it can; says whether it did."""
        op = self.to_do[rank][0] if self.to_do[rank] else None
        if isinstance(op, AllReduce | ReduceScatter | AllGather):
            return self.together(rank, op)
        if isinstance(op, Recv) and rank not in self.at_receive:
            return self.post(rank, op)
        if op is None or (isinstance(op, Recv | Add) and not self.may_write(rank, op)):
            return False
        if isinstance(op, Send):
            self.send(rank, op)
        elif isinstance(op, Recv):
            self.receive(rank, op)
        elif not isinstance(op, Join):
            self.memories[rank].do(op)
        self.to_do[rank].pop(0)
        return True

    def send(self, rank, op):
        require(op.to != rank and 0 <= op.to < self.program.world_size, f"rank {rank} does {op}: there is no such peer")
        self.sent[rank, op.to].append((op.value, self.memories[rank].read(op.value)))

    def receive(self, rank, op):
        value, content = self.sent[op.source, rank][self.received[op.source, rank]]
        whole = isinstance(self.program.goal, Collective) and value == Slices(0, self.program.goal.slices)
        same = value == op.value or (whole and op.value == Part(op.source))
        require(same, f"rank {rank} does {op}, and {value} arrives")
        require(str(value)[0] not in "RDU", f"rank {rank} does {op}, and {value} stays on its rank")
        self.memories[rank].write(op.value, content, op.reduce)
        self.received[op.source, rank] += 1
        self.at_receive.remove(rank)

    def post(self, rank, op):
        """A receive that overwrites its place is posted when nobody is sent what is there; one that adds, at once."""
        if op.reduce or not self.being_sent(rank, op.value):
            self.at_receive.add(rank)
        return rank in self.at_receive

    def may_write(self, rank, op):
        """Whether a message is there, and nothing that is still being sent would be overwritten."""
        if isinstance(op, Recv) and len(self.sent[op.source, rank]) == self.received[op.source, rank]:
            return False
        return not self.being_sent(rank, op.value if isinstance(op, Recv) else op.into)

    def being_sent(self, rank, written):
        return self.sends == "rendezvous" and any(
            memory_of(value) & memory_of(written)
            for receiver in range(self.program.world_size)
            for value, _ in self.sent[rank, receiver][self.posted(rank, receiver) :]
        )

    def posted(self, sender, receiver):
        """How many receives of a channel are done, or posted."""
        waiting = receiver in self.at_receive and self.to_do[receiver][0].source == sender
        return self.received[sender, receiver] + waiting

    def together(self, rank, op):
        partners = partners_of(self.program, rank, op)
        if not all(self.to_do[rank][:1] == [op] for rank in partners):
            return False
        given = {rank: self.memories[rank].give(op) for rank in partners}
        for rank in partners:
            self.memories[rank].take(op, given)
            self.to_do[rank].pop(0)
        return True


def partners_of(program, rank, op):
    """The ranks that do an operation together with this one: their places in the mesh differ along its axis only."""
    axes = [name for name, _ in program.mesh]
    require(not axes or op.axis in (*axes, "world"), f"rank {rank} does {op}, and there is no such axis")

    def others(one):
        found = {}
        for name, size in reversed(program.mesh):
            one, found[name] = divmod(one, size)
        return [place for name, place in found.items() if op.axis not in (name, "world")] if op.axis in axes else []

    return [other for other, ops in enumerate(program.ranks) if op in ops and others(other) == others(rank)]


def memory_of(value):
    """The pieces of memory that a name stands for."""
    return {("slice", index) for index in range(value.start, value.stop)} if isinstance(value, Slices) else {value}


class Tensor:
    """What a rank holds in a collective: a whole number in each slice, and the parts it keeps apart."""

    def __init__(self, program, rank):
        self.goal, self.rank, self.ranks = program.goal, rank, range(program.world_size)
        self.base = 2 ** (len(program) + 1)  # no operation more than doubles a digit, so none runs over
        self.slices = [self.at_first(rank, index) for index in range(self.goal.slices)]
        self.parts = {}

    def at_first(self, rank, index):
        mine, rooted = rank == index, rank == self.goal.root
        in_row = index // len(self.ranks) == rank
        holds = {
            "all-gather": mine,
            "gather": mine,
            "broadcast": rooted,
            "scatter": rooted,
            "all-to-all": in_row,
        }.get(self.goal.kind, True)
        return self.base ** (rank * self.goal.slices + index) if holds else 0

    def read(self, value):
        if isinstance(value, Part):
            require(value in self.parts, f"rank {self.rank} reads {value}, which never came")
            return list(self.parts[value])
        inside = isinstance(value, Slices) and value.stop <= self.goal.slices
        require(inside, f"rank {self.rank} names {value}, which is not in the tensor")
        return self.slices[value.start : value.stop]

    def write(self, value, content, add):
        if add:
            mine = self.read(value)
            require(len(mine) == len(content), f"rank {self.rank} adds pieces of different length")
            content = [one + other for one, other in zip(mine, content, strict=True)]
        if isinstance(value, Part):
            self.parts[value] = content
        else:
            self.slices[value.start : value.stop] = content

    def do(self, op):
        require(isinstance(op, Add), f"rank {self.rank} does {op}, which is not for a collective")
        self.write(op.into, self.read(op.value), add=True)

    def check_end(self):
        """Each slice that the goal promises is the sum of what all ranks had in it at first."""
        require(self.goal.root is None or self.goal.root in self.ranks, "the goal's root does not exist")
        for index, number in enumerate(self.slices):
            mine, rooted = self.rank == index, self.rank == self.goal.root
            in_column = index % len(self.ranks) == self.rank
            promises = {
                "reduce": rooted,
                "gather": rooted,
                "reduce-scatter": mine,
                "scatter": mine,
                "all-to-all": in_column,
            }
            total = sum(self.at_first(rank, index) for rank in self.ranks)
            right = number == total > 0 or not promises.get(self.goal.kind, True)
            require(right, f"rank {self.rank} ends with the wrong sum in slice {index}")


class Shelf:
    """What a rank holds in a training step: values by the names of the text form, such as A0.3."""

    def __init__(self, program, rank):
        self.program, self.goal, self.rank = program, program.goal, rank
        self.held, self.ever_held = set(), set()
        self.did = []  # (kind, stage, micro-batch), and the names of buckets and of the optimizer step
        self.elements = range(math.lcm(*range(1, program.world_size + 1)))  # of each bucket, for parts of any size
        self.sums = {}  # bucket → element → the gradients in it; of a bucket that is kept in parts, those of the part
        self.scattered = {}  # number of a bucket → the elements that are this rank's part of it
        for op in program.ranks[rank]:
            if isinstance(op, ReduceScatter) and isinstance(op.value, Bucket):
                mine = self.my_part(partners_of(program, rank, op))
                require(self.scattered.setdefault(op.value.index, mine) == mine, f"rank {rank} has two parts")
        sharded = self.scattered if self.goal.sharded else {}
        self.parts = {index: dict.fromkeys(mine, "old") for index, mine in sharded.items()}  # of the parameters
        self.wholes = {}  # bucket → its parameters as they were gathered, element by element

    def my_part(self, ranks):
        """The elements that a rank keeps of what it shares with others."""
        length = len(self.elements) // len(ranks)
        return self.elements[ranks.index(self.rank) * length :][:length]

    def read(self, name):
        require(str(name) in self.held, f"rank {self.rank} needs {name}, which it does not hold")

    def write(self, name, content, add):
        del content  # only names matter here
        require(not add and str(name)[0] in "AGRDU", f"rank {self.rank} gets {name}, not for a training step")
        require(str(name) not in self.ever_held, f"rank {self.rank} makes {name} a second time")
        self.held.add(str(name))
        self.ever_held.add(str(name))

    def do(self, op):
        require(not isinstance(op, Add), f"rank {self.rank} does {op}, which is not for a training step")
        if isinstance(op, Free) and str(op.value) in self.wholes:
            del self.wholes[str(op.value)]
        elif isinstance(op, Free) and isinstance(op.value, Shard):
            require(str(op.value)[0] == "U", f"rank {self.rank} does {op}, and no other rank keeps that")
            require(op.value.of in self.sums, f"rank {self.rank} does {op}, which it does not hold")
            del self.sums[op.value.of]
        elif isinstance(op, Free):
            self.read(op.value)
            self.held.remove(str(op.value))
        elif isinstance(op, OptimizerStep):
            self.optimizer_step(op)
        else:
            self.compute(halves(op))

    def compute(self, parts):
        for part in parts:
            for name in needs(*part, last=self.goal.stages - 1):
                self.read(name)
            if self.goal.sharded:
                indexes = [i for i, (start, stop) in enumerate(self.goal.buckets) if start <= part[1] < stop]
                whole = indexes and all(f"T{index}" in self.wholes for index in indexes)
                require(whole, f"rank {self.rank} computes stage {part[1]} without its parameters")
        for part in parts:
            self.did.append(part)
            for name in makes(*part):
                self.write(name, None, add=False)

    def give(self, op):
        """What this rank brings to what its group does together."""
        if isinstance(op, AllReduce) and isinstance(op.value, Shard):
            require(op.value.of in self.sums, f"rank {self.rank} does {op} and has no such part")
            return self.sums[op.value.of]
        require(
            isinstance(op, AllReduce) or op.algorithm in ("auto", "ring", "direct"),
            f"rank {self.rank} does {op} by an unknown algorithm",
        )
        if isinstance(op, AllGather):
            known = isinstance(op.value, Parameters) and op.value.index in self.parts
            require(known, f"rank {self.rank} has no part for {op}")
            return self.parts[op.value.index]
        known = isinstance(op.value, Bucket) and not (isinstance(op, AllReduce) and op.value.turn is not None)
        bucket = buckets(self.goal).get(f"U{op.value.index}", ()) if known else ()
        require(bucket, f"rank {self.rank} does {op}, which is no bucket of the goal")
        require(isinstance(op, ReduceScatter) or not self.goal.sharded, f"rank {self.rank} does {op}, and keeps parts")
        mine = self.gradients()
        turns = sorted({name.partition(".")[2] for _, name in mine}, key=int)
        turn = None if op.value.turn is None else turns[op.value.turn : op.value.turn + 1]
        names = [name for stage, name in mine if stage in bucket and (turn is None or name.partition(".")[2] in turn)]
        for name in names:
            self.read(name)
        return names

    def take(self, op, given):
        """What this rank has of it afterwards."""
        if isinstance(op, AllGather):
            require(str(op.value) not in self.wholes, f"rank {self.rank} gathers {op.value} twice")
            require(len(set(map(len, given.values()))) == 1, f"rank {self.rank} gathers parts of different sizes")
            pieces = [piece for part in given.values() for piece in part.items()]
            require([at for at, _ in pieces] == [*self.elements], f"rank {self.rank} gathers what is not {op.value}")
            self.wholes[str(op.value)] = dict(pieces)
        elif isinstance(op.value, Shard):
            require(len(set(map(tuple, given.values()))) == 1, f"rank {self.rank} adds different parts by {op}")
            sums = {at: sum((part[at] for part in given.values()), Counter()) for at in self.sums[op.value.of]}
            self.sums[op.value.of] = sums
        else:
            mine = self.scattered[op.value.index] if isinstance(op, ReduceScatter) else self.elements
            total = Counter(name for names in given.values() for name in names)
            require(op.value not in self.sums, f"rank {self.rank} does {op} twice")
            self.sums[op.value] = dict.fromkeys(mine, total)
            self.did += [f"U{op.value.index}", op]
        if isinstance(op, AllReduce) and isinstance(op.value, Bucket):
            everybody = [other for ops in self.program.ranks for other in ops if isinstance(other, AllReduce)]
            ways = {(other.axis, other.algorithm) for other in everybody if other.value == op.value}
            require(len(ways) == 1, f"{op.value} is reduced along different axes, or by different algorithms")
            self.write(op.value, None, add=False)

    def optimizer_step(self, op):
        require(op not in self.did, f"rank {self.rank} updates the weights twice")
        scatters = [op for op in self.program.ranks[self.rank] if isinstance(op, ReduceScatter)]
        require(all(other in self.did for other in scatters), f"rank {self.rank} updates before its gradients came")
        self.did.append(op)
        require(all(other.value in self.sums for other in scatters), f"rank {self.rank} lost its gradients")
        for index, mine in self.scattered.items():
            self.parts[index] = {at: frozenset(self.total(index, at).items()) for at in mine}
        for stage, name in self.gradients():
            if any(stage in buckets(self.goal)[f"U{index}"] for index in self.scattered):
                continue
            holding = [bucket for bucket, stages in buckets(self.goal).items() if stage in stages]
            for needed in holding or [name]:
                self.read(needed)

    def total(self, index, at):
        """What this rank has summed in one element of a bucket, of all micro-batches."""
        return sum((sums[at] for bucket, sums in self.sums.items() if bucket.index == index), Counter())

    def gradients(self):
        """The weights' gradients that this rank makes in its whole list, after their stages."""
        parts = [part for op in self.program.ranks[self.rank] for part in halves(op)]
        return [(stage, f"D{stage}.{microbatch}") for kind, stage, microbatch in parts if kind in "BW"]

    def places(self):
        """The stages and micro-batches this rank worked on."""
        return {(part[1], part[2]) for part in self.did if isinstance(part, tuple)}

    def check_end(self):
        if any(isinstance(op, Free) and str(op.value)[0] in "AGR" for ops in self.program.ranks for op in ops):
            left = sorted(name for name in self.held if name[0] in "AGR")
            require(not left, f"rank {self.rank} never frees {left}")


def check_parts(program, shelves):
    """Each part of the parameters was updated with every gradient, once; every rank ends with all of them."""
    made = {(stage, name) for shelf in shelves for stage, name in shelf.gradients()}
    updates = any(OptimizerStep() in ops for ops in program.ranks)
    axes, ways = defaultdict(set), defaultdict(set)
    for ops in program.ranks:
        sums = defaultdict(list)
        for op in ops:
            value = (
                op.value.of if isinstance(op, AllReduce) and isinstance(op.value, Shard) else getattr(op, "value", None)
            )
            if isinstance(op, AllReduce | ReduceScatter | AllGather) and value is op.value:
                axes[value.index].add(op.axis)
            if isinstance(op, AllReduce | ReduceScatter):
                sums[value.index].append(str(op))
        for index, words in sums.items():
            ways[index].add(tuple(sorted(words)))
    for shelf in shelves:
        for index in {bucket.index for bucket in shelf.sums} | shelf.scattered.keys():
            bucket = buckets(program.goal)[f"U{index}"]
            wanted = Counter(name for stage, name in made if stage in bucket)
            mine = shelf.scattered.get(index, shelf.elements)
            require(len(axes[index]) == 1, f"bucket {index} is reduced and gathered along different axes")
            require(len(ways[index]) == 1, f"bucket {index} is reduced in different ways")
            if any(value.index == index for value in shelf.sums):  # else the sums were freed, after the update
                right = all(shelf.total(index, at) == wanted for at in mine)
                require(right, f"rank {shelf.rank} has other gradients in U{index} than all of them once")
            if not updates or index not in shelf.scattered:
                continue
            new = frozenset(wanted.items())
            right = shelf.parts.get(index) == dict.fromkeys(mine, new)
            require(right, f"rank {shelf.rank} does not update its part of T{index}")
            if not program.goal.sharded:
                right = shelf.wholes.get(f"T{index}") == dict.fromkeys(shelf.elements, new)
                require(right, f"rank {shelf.rank} ends with other weights in T{index}")


def halves(op):
    """What a stage does, from the text form: F0.3&B1.2 → (F, 0, 3), (B, 1, 2)."""
    words = [word for word in str(op).split("&") if word[0] in "FBIW"]
    return [(word[0], *map(int, word[1:].split("."))) for word in words]


def needs(kind, stage, microbatch, last):
    names = [f"A{stage - 1}.{microbatch}"] if stage > 0 else []
    names += [f"A{stage}.{microbatch}"] if kind != "F" else []
    names += [f"G{stage}.{microbatch}"] if kind in "BI" and stage != last else []
    return names + ([f"R{stage}.{microbatch}"] if kind == "W" else [])


def makes(kind, stage, microbatch):
    names = [f"G{stage - 1}.{microbatch}"] if kind in "BI" and stage > 0 else []
    return [*names, {"F": "A", "B": "D", "I": "R", "W": "D"}[kind] + f"{stage}.{microbatch}"]


def buckets(goal):
    return {f"U{index}": range(start, stop) for index, (start, stop) in enumerate(goal.buckets)}


def check_training_step(goal, shelves):
    """Every stage did every micro-batch once, forward and backward on one rank; replicas summed their gradients."""
    done = defaultdict(list)  # (stage, micro-batch) → (kind, rank)
    for shelf in shelves:
        for kind, *place in (part for part in shelf.did if isinstance(part, tuple)):
            done[tuple(place)].append((kind, shelf.rank))
    updates = {any(isinstance(part, OptimizerStep) for part in shelf.did) for shelf in shelves if shelf.places()}
    require(len(updates) <= 1, "some ranks update their weights, and others do not")
    wanted = {(stage, microbatch) for stage in range(goal.stages) for microbatch in range(goal.microbatches)}
    require(set(done) == wanted, "a stage or micro-batch is missing, or one too many")
    for place, visits in done.items():
        kinds, ranks = "".join(sorted(kind for kind, _ in visits)), {rank for _, rank in visits}
        require(kinds in ("BF", "FIW") and len(ranks) == 1, f"stage and micro-batch {place} had {visits}")
    for stage in range(goal.stages):
        replicas = {rank for place, visits in done.items() if place[0] == stage for _, rank in visits}
        holding = [bucket for bucket, stages in buckets(goal).items() if stage in stages]
        require(holding or len(replicas) == 1, f"stage {stage} has replicas, and no bucket to sum its gradients in")
        for bucket in holding:
            # A rank that has no micro-batch adds nothing to a sum, whatever stages it would have computed.
            members = [shelf for shelf in shelves if bucket in shelf.did and shelf.places()]
            parts = {tuple(sorted({s for s, _ in shelf.places()} & set(buckets(goal)[bucket]))) for shelf in members}
            require(len(parts) <= 1, f"{bucket} holds different stages on different ranks")
        summed = all(bucket in shelves[rank].did for rank in replicas for bucket in holding)
        require(summed, f"a replica of stage {stage} does not sum its gradients with the others")
