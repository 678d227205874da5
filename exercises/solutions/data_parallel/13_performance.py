"""Say where the time of a step went.

You have recorded a step. For every rank you know the spans of time in which it computed, and for each all-reduce the
span from the moment when the rank joined it to the moment when it was over. Which part of the step could be better?

    rank 0   compute ▒▒▒▒▒▒▒▒▒▒▒▒▒▒
                    all-reduce ····▓▓▓▓▓▓▓▓
                               wait│travel     what goes on beside ▒ is hidden and costs nothing; the rest is exposed
    rank 1   compute ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒
                        all-reduce ▓▓▓▓▓▓▓▓
                                   └ only now has every rank joined

Waiting is not communication: a faster network does not help against a late rank. First come six small functions, a line
or two each. Then three functions use them on a `mp.Trace`, which is what `mp.record` makes of a run: the check gives
them recordings of real steps.

Lesson: docs/data_parallel/11_performance.md           Check it: microparallel learn check performance
"""

import torch
from torch import nn

import microparallel as mp

Span = tuple[float, float]  # start and end, in seconds


def union(spans: list[Span]) -> list[Span]:
    """The same times, as spans that do not overlap."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def seconds(spans: list[Span]) -> float:
    """How long at least one of these spans goes on: two at the same time count once."""
    return sum(end - start for start, end in union(spans))


def exposed(spans: list[Span], compute: list[Span]) -> float:
    """How long at least one of `spans` goes on while the rank does not compute."""
    # ┌ hole
    #: # You have seconds(…). How long does the rank do anything at all? (compute + spans is one list.) How much of that
    #: # is computing?
    #: raise NotImplementedError("exposed: time that nothing hides")
    return seconds(compute + spans) - seconds(compute)
    # └


def hidden(spans: list[Span], compute: list[Span]) -> float:
    """How long at least one of `spans` goes on while the rank computes."""
    # ┌ hole
    #: # What is not exposed is hidden.
    #: raise NotImplementedError("hidden: time behind computation")
    return seconds(spans) - exposed(spans, compute)
    # └


def split(joined: list[Span]) -> list[tuple[Span, Span]]:
    """For every rank, the span in which it waits and the span in which the tensor travels.

    joined: one all-reduce, as each rank saw it: from the moment when that rank joined to the moment when it was over
    """
    # ┌ hole
    #: # An all-reduce needs all ranks. From which moment on can the tensor travel?
    #: raise NotImplementedError("split: waiting, then travelling")
    all_joined = max(start for start, _ in joined)
    return [((start, all_joined), (all_joined, end)) for start, end in joined]
    # └


def efficiency(alone: tuple[int, float], together: tuple[int, float], ranks: int) -> float:
    """The speed-up as a share of the ideal: 1 if `ranks` ranks do `ranks` times as many samples a second as one.

    alone, together: the samples of a step and its seconds, of one rank and of all ranks
    """
    # ┌ hole
    #: # Compare samples a second, and it is right for both kinds of scaling: the same batch shared by more ranks
    #: # (strong), and the same batch for each rank (weak).
    #: raise NotImplementedError("efficiency: samples a second, compared with the ideal")
    speedup = (together[0] / together[1]) / (alone[0] / alone[1])
    return speedup / ranks
    # └


def ring_seconds(ranks: int, size: int, latency: float, seconds_per_byte: float) -> float:
    """How long a ring all-reduce of `size` bytes takes, adding not counted; see your ring: which hops, which slices?

    latency: seconds that every message takes, however small (α); seconds_per_byte: in addition, for each byte (β)
    """
    # ┌ hole
    #: # Hops one after another, in each a message of one slice.
    #: raise NotImplementedError("ring_seconds: hops times the time of one message")
    return 2 * (ranks - 1) * (latency + size / ranks * seconds_per_byte)
    # └


def bound(step: float, communication: float, waiting: float) -> str:
    """What bounds a step: "communication", "straggler" or "compute".

    step: its seconds; communication: how long the tensor travels, exposed; waiting: for late ranks, exposed
    """
    # ┌ hole
    #: # The larger of the two bounds the step if it is at least a fifth of it; waiting means that there is a straggler.
    #: # If both are less than a fifth, the step computes.
    #: raise NotImplementedError("bound: name the larger part, if it is worth naming")
    if max(communication, waiting) < step / 5:
        return "compute"
    return "communication" if communication > waiting else "straggler"
    # └


# ── a recorded step ─────────────────────────────────────────────────────────────────────────────────────────────────
#
# trace.events     what the ranks did, in no particular order; of each `event` you know
#     event.rank, event.start, event.end
#     event.computes    whether it is a computation
#     event.kind        "collective" for an all-reduce
#     event.number      which all-reduce of its rank it is, counted from 0: those with one number belong together
#     event.asked       when this rank joined; a collective's `start` is when the last rank had joined
# trace.ranks      how many there are
# trace.makespan   the seconds from the first event's start to the last one's end


def computing(trace: mp.Trace, rank: int) -> list[Span]:
    """When a rank computed."""
    # ┌ hole
    #: raise NotImplementedError("computing: the spans of this rank's computations")
    return [(event.start, event.end) for event in trace.events if event.rank == rank and event.computes]
    # └


def all_reduces(trace: mp.Trace) -> list[list[Span]]:
    """The all-reduces, in the order of their numbers: of each, what every rank saw, from rank 0 on.

    A rank saw it from the moment when it joined to the moment when it was over.
    """
    # ┌ hole
    #: # Which events belong to one all-reduce? Put each at its place: first by number, then by rank.
    #: raise NotImplementedError("all_reduces: by number, and by rank")
    reduces = [event for event in trace.events if event.kind == "collective"]
    numbers = sorted({event.number for event in reduces})
    in_order = sorted(reduces, key=lambda event: event.rank)
    return [[(event.asked, event.end) for event in in_order if event.number == number] for number in numbers]
    # └


def where_it_went(trace: mp.Trace) -> list[tuple[float, float, float, str]]:
    """For each rank: hidden communication, exposed communication, exposed waiting, and what bounds the step.

    While one all-reduce travels, another may still wait for a rank. Such a time is communication: it counts as waiting
    only while the rank neither computes nor has anything travelling.
    """
    # ┌ hole
    #: # You have all you need above: split every all-reduce; then, rank by rank, hidden, exposed and bound.
    #: raise NotImplementedError("where_it_went: put your functions together")
    pairs = [split(joined) for joined in all_reduces(trace)]
    found = []
    for rank in range(trace.ranks):
        busy = computing(trace, rank)
        waits, travels = ([pair[rank][part] for pair in pairs] for part in (0, 1))
        communication, waiting = exposed(travels, busy), exposed(waits, busy + travels)
        found.append((hidden(travels, busy), communication, waiting, bound(trace.makespan, communication, waiting)))
    return found
    # └


def record_a_step(comms: mp.Comms) -> str:
    """One step of data parallelism on real ranks, in which rank 1 has three times the samples; the trace as text."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
    parallel = mp.DataParallel(model, comms, bucket_cap_mb=1, overlap=True)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    inputs = torch.randn(256 if comms.rank != 1 else 768, 512)
    with mp.record(comms) as recorder:
        for _ in range(3):  # the first steps also make buckets and connect
            optimizer.zero_grad()
            parallel(inputs).square().mean().backward()
            optimizer.step()
    return recorder.trace.step(2).to_json() if comms.rank == 0 else ""


if __name__ == "__main__":
    trace = mp.Trace.from_json(mp.launch(record_a_step, ranks=2)[0])
    print(f"a step of {1000 * trace.makespan:.1f} ms on this machine, in ms")
    print("rank   hidden   communication   waiting   bound by")
    for rank, (behind, talk, wait, by) in enumerate(where_it_went(trace)):
        print(f"{rank:>4}{1000 * behind:>9.1f}{1000 * talk:>16.1f}{1000 * wait:>10.1f}   {by}")
    print(f"a step of 95 ms with 3 ranks, 60 ms alone: efficiency {efficiency((32, 60.0), (96, 95.0), 3):.0%}")
    print(f"100 MB round a ring of 3, 10 µs and 10 GB/s: {1000 * ring_seconds(3, 100_000_000, 1e-5, 1e-10):.1f} ms")
