"""Read a hang: which rank is to blame, and why?

Nothing moves. The ranks cannot answer, but each has written its calls into a flight file, the last one too, and
`microparallel why` reads these files. Here you write its judgement. An example, a run of three ranks:

    rank 0   running   all_reduce(float32[64])   all_reduce(float32[64])   ▒ waits
    rank 1   running   all_reduce(float32[64])   no call: it computes               ◀ (1, "still computing")
    rank 2   running   all_reduce(float32[64])   all_reduce(float32[64])   ▒ waits

Two ranks wait in their second call for the rank that has not made it. There are five reasons; of several that hold, the
first counts, since what follows is a consequence of it:

    "other order"       the rank makes another call than most others do in its place
    "other shape"       the same call, with a tensor of another shape
    "dead"              its process has ended, and it has not returned from its function
    "missing call"      it has returned from its function, and another rank waits for its call or message
    "still computing"   it runs, is in no call, and another rank waits for it

The rank that you look at first is usually innocent: it waits for another, which may wait for a third. In each of these
runs one rank is to blame. The check has recorded flights of other runs than the one above.

Lesson: docs/seeing/hangs.md                           Check it: microparallel learn check read-a-hang
"""

import time

import torch

import microparallel as mp
from microparallel.observe.flight_file import Record, Snapshot

# A Snapshot is what one rank has left:
#   one.rank                its number
#   one.state               of its process: "running" or "ended"
#   one.ending              "finished" if it has returned from its function, else "running" (or how it broke off)
#   one.records             its calls, in order
#   one.current             the call that it is in, or None
# A Record is one call:
#   call.kind               "collective", "send" or "recv"
#   call.name, call.text    "all_reduce" and "all_reduce(float32[64], op='sum')"
#   call.sequence           1, 2, 3, …: of the collectives; or of the messages to or from call.peer
#   call.peer               the other rank of a send or recv; None in a collective


def calls_that_differ(flights: list[Snapshot]) -> tuple[int, str] | None:
    """The rank whose collective is not that of most ranks, with the reason; None if all make the same calls.

    A collective has the same sequence number on all ranks: their n-th collectives belong together.
    """
    # ┌ hole
    #: # Go through the sequence numbers, the lowest first. Not every rank has got to each of them. What do most ranks
    #: # say (call.text), and which rank says something else? Is it another call, or the same with another tensor?
    #: raise NotImplementedError("compare the n-th collectives of all ranks")
    made: dict[int, dict[int, Record]] = {}
    for one in flights:
        for call in one.records:
            if call.kind == "collective":
                made.setdefault(call.sequence, {})[one.rank] = call
    for _, calls in sorted(made.items()):
        texts = [call.text for call in calls.values()]
        usual = max(calls.values(), key=lambda call: texts.count(call.text))
        for rank, call in calls.items():
            if call.text != usual.text:
                return rank, "other order" if call.name != usual.name else "other shape"
    return None
    # └


def waits_for(one: Snapshot, flights: list[Snapshot]) -> list[int]:
    """The ranks for which this one waits: they have not made their part of the call that it is in."""
    call = one.current
    if call is None or one.state == "ended":
        return []

    # ┌ hole
    #: # In a collective: who has made fewer of them? In a recv: has call.peer sent as many messages to this rank?
    #: raise NotImplementedError("who has not made their part of this call")
    def parts(other: Snapshot) -> int:
        if call.kind == "collective":
            return sum(done.kind == "collective" for done in other.records)
        kind = "send" if call.kind == "recv" else "recv"
        return sum(done.kind == kind and done.peer == one.rank for done in other.records)

    others = [other for other in flights if other.rank != one.rank]
    if call.kind != "collective":
        others = [other for other in others if other.rank == call.peer]
    return [other.rank for other in others if parts(other) < call.sequence]
    # └


def read_a_hang(flights: list[Snapshot]) -> tuple[int, str]:
    """The rank that is to blame, and the reason: one of the five above."""
    # ┌ hole
    #: # In the order of the list above. For the last two: of the ranks that others wait for, which waits for nobody?
    #: raise NotImplementedError("the first reason that holds, and its rank")
    if (found := calls_that_differ(flights)) is not None:
        return found
    for one in flights:
        if one.state == "ended":
            return one.rank, "dead"
    waited_for = {rank for one in flights for rank in waits_for(one, flights)}
    culprit = next(one for one in flights if one.rank in waited_for and not waits_for(one, flights))
    return culprit.rank, "missing call" if culprit.ending == "finished" else "still computing"
    # └


if __name__ == "__main__":
    from microparallel.observe.folders import gather

    def late(comms: mp.Comms) -> tuple[int, str] | None:
        comms.all_reduce(torch.ones(64))
        if comms.rank == 1:
            time.sleep(3)  # a slow disk, say
        request = comms.all_reduce(torch.ones(64), async_op=True)
        found = None
        if comms.rank == 0:  # looks at the others, while it waits for them itself
            time.sleep(1)
            found = read_a_hang([one for one in gather(comms.flight.folder) if one.rank != 0])
        request.wait()
        return found

    print(mp.launch(late, ranks=3)[0])  # (1, 'still computing')
