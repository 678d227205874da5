"""Say where the time of a step went.

You have recorded a step: for every rank, the spans of time in which it computed, and the spans from the moment it
joined an all-reduce to the moment that was over. Which part of it could be better?

    rank 0   compute ▒▒▒▒▒▒▒▒▒▒▒▒▒▒
                    all-reduce ····▓▓▓▓▓▓▓▓
                               wait│travel     what goes on beside ▒ is hidden and costs nothing; the rest is exposed
    rank 1   compute ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒
                        all-reduce ▓▓▓▓▓▓▓▓
                                   └ only now has everybody come

Waiting is not communication: a faster network does not help against a late rank. Six small functions, a line or two
each.

Lesson: docs/data_parallel/11_performance.md           Check it: microparallel learn check performance
"""

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
    # You have seconds(…). How long does the rank do anything at all (compute + spans is one list), and how much of
    # that is computing?
    raise NotImplementedError("exposed: time that nothing hides")


def hidden(spans: list[Span], compute: list[Span]) -> float:
    """How long at least one of `spans` goes on while the rank computes."""
    # What is not exposed is hidden.
    raise NotImplementedError("hidden: time behind computation")


def split(joined: list[Span]) -> list[tuple[Span, Span]]:
    """For every rank, the span in which it waits and the span in which the tensor travels.

    joined: one all-reduce, as each rank saw it: from the moment when that rank joined to the moment when it was over
    """
    # An all-reduce needs everybody. From when on can the tensor travel?
    raise NotImplementedError("split: waiting, then travelling")


def efficiency(alone: tuple[int, float], together: tuple[int, float], ranks: int) -> float:
    """The speed-up as a share of the ideal: 1 if `ranks` ranks do `ranks` times as many samples a second as one.

    alone, together: the samples of a step and its seconds, of one rank and of all ranks
    """
    # Compare samples a second, and it is right for both kinds of scaling: the same batch shared by more ranks
    # (strong), and the same batch for each rank (weak).
    raise NotImplementedError("efficiency: samples a second, compared with the ideal")


def ring_seconds(ranks: int, size: int, latency: float, seconds_per_byte: float) -> float:
    """How long a ring all-reduce of `size` bytes takes, adding not counted; see your ring: which steps, which slices?

    latency: seconds that every message takes, however small (α); seconds_per_byte: in addition, for each byte (β)
    """
    # Steps one after another, each a message of one slice.
    raise NotImplementedError("ring_seconds: steps times the time of one message")


def bound(step: float, communication: float, waiting: float) -> str:
    """What bounds a step: "communication", "straggler" or "compute".

    step: its seconds; communication: how long the tensor travels, exposed; waiting: for late ranks, exposed
    """
    # The larger of the two bounds the step if it is at least a fifth of it; waiting means that there is a straggler.
    # If both are less than a fifth, the step computes.
    raise NotImplementedError("bound: name the larger part, if it is worth naming")


if __name__ == "__main__":
    # Three ranks, one step, in milliseconds. Rank 2 is slow.
    compute = [[(0.0, 60.0)], [(0.0, 62.0)], [(0.0, 90.0)]]
    all_reduces = [[(30.0, 44.0), (45.0, 59.0), (62.0, 95.0)] for _ in compute]  # one for each of three buckets
    all_reduces[2] = [(40.0, 44.0), (55.0, 59.0), (90.0, 95.0)]

    print("rank   hidden   communication   waiting   bound by")
    pairs = [split([mine[number] for mine in all_reduces]) for number in range(3)]
    for rank, busy in enumerate(compute):
        waits, travels = ([pair[rank][part] for pair in pairs] for part in (0, 1))
        talk, wait = exposed(travels, busy), exposed(waits, busy)
        print(f"{rank:>4}{hidden(travels, busy):>9g}{talk:>16g}{wait:>10g}   {bound(95.0, talk, wait)}")
    print(f"a step of 95 ms with 3 ranks, 60 ms alone: efficiency {efficiency((32, 60.0), (96, 95.0), 3):.0%}")
    print(f"100 MB round a ring of 3, 10 µs and 10 GB/s: {1000 * ring_seconds(3, 100_000_000, 1e-5, 1e-10):.1f} ms")
