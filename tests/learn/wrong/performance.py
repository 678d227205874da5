from answers import Answer

EXPOSED = "seconds(compute + spans) - seconds(compute)"
HIDDEN = "seconds(spans) - exposed(spans, compute)"
SPLIT = "[((start, all_joined), (all_joined, end)) for start, end in joined]"
RING = "2 * (ranks - 1) * (latency + size / ranks * seconds_per_byte)"
FIFTH = "if max(communication, waiting) < step / 5:"
LARGER = '"communication" if communication > waiting else "straggler"'

BUSY = "if event.rank == rank and event.computes]"
SEEN = "[(event.asked, event.end) for event in in_order if event.number == number]"
WAITING = "exposed(waits, busy + travels)"
FOUND = "(hidden(travels, busy), communication, waiting, bound(trace.makespan, communication, waiting))"

ANSWERS = [
    Answer("all communication", {EXPOSED: "seconds(spans)"}, "also what goes on behind computation", True),
    Answer(
        "totals subtracted",
        {EXPOSED: "max(0.0, seconds(spans) - seconds(compute))"},
        "only what happens at the same time",
    ),
    Answer(
        "overlapping spans counted twice",
        {
            EXPOSED: "sum(b - a for a, b in spans) - "
            "sum(max(0.0, min(b, d) - max(a, c)) for a, b in spans for c, d in compute)"
        },
        "counted twice: use seconds",
    ),
    Answer(
        "hidden and exposed swapped",
        {EXPOSED: "seconds(spans) + seconds(compute) - seconds(compute + spans)"},
        "this is what is hidden: exposed is the rest",
    ),
    Answer("hidden is everything", {HIDDEN: "seconds(spans)"}, "also what is exposed"),
    Answer("hidden off the computation", {HIDDEN: "seconds(compute) - exposed(spans, compute)"}, "only computes"),
    Answer(
        "hidden is the shorter one", {HIDDEN: "min(seconds(spans), seconds(compute))"}, "the shorter of the two totals"
    ),
    Answer(
        "hidden pair by pair",
        {HIDDEN: "sum(max(0.0, min(b, d) - max(a, c)) for a, b in spans for c, d in compute)"},
        "counted twice: use seconds",
    ),
    Answer(
        "waiting is communication",
        {SPLIT: "[((start, start), (start, end)) for start, end in joined]"},
        "waiting is counted as communication: nothing travels",
        True,
    ),
    Answer(
        "earliest instead of latest",
        {"max(start for start, _ in joined)": "min(start for start, _ in joined)"},
        "the latest start counts",
    ),
    Answer(
        "waiting until the end",
        {"max(start for start, _ in joined)": "max(end for _, end in joined)"},
        "every rank waits until the end here",
    ),
    Answer(
        "lengths instead of spans",
        {SPLIT: "[(all_joined - start, end - all_joined) for start, end in joined]"},
        "these are lengths: return spans",
    ),
    Answer("speed-up", {"return speedup / ranks": "return speedup"}, "divided by the ranks"),
    Answer(
        "seconds only",
        {"speedup = (together[0] / together[1]) / (alone[0] / alone[1])": "speedup = alone[1] / together[1]"},
        "compare samples a second",
    ),
    Answer(
        "weak only",
        {"return speedup / ranks": "return alone[1] / together[1]"},
        "right if every rank has the batch of one",
    ),
    Answer("upside down", {"return speedup / ranks": "return ranks / speedup"}, "upside down"),
    Answer("one half of the ring", {RING: RING.replace("2 * ", "")}, "only one half of the ring is counted"),
    Answer("whole tensors", {RING: RING.replace("size / ranks", "size")}, "a ring passes slices of size / ranks"),
    Answer(
        "latency paid once",
        {RING: "latency + 2 * (ranks - 1) * size / ranks * seconds_per_byte"},
        "the latency is paid once here",
    ),
    Answer(
        "one step too many", {RING: RING.replace("(ranks - 1)", "ranks")}, "each half has ranks - 1 hops, not ranks"
    ),
    Answer(
        "straggler called communication",
        {LARGER: '"communication"', FIFTH: "if communication + waiting < step / 5:"},
        "a late rank is a straggler",
    ),
    Answer("however small", {FIFTH: "if False:"}, "below a fifth of the step, it computes"),
    Answer("more than a fifth", {FIFTH: FIFTH.replace("<", "<=")}, "exactly a fifth is at least a fifth"),
    Answer(
        "communication first",
        {LARGER: '"communication" if communication >= step / 5 else "straggler"'},
        "although the waiting is longer",
    ),
    Answer(
        "two numbers",
        {EXPOSED: "__import__('torch').ones(2)"},
        "exposed should be one number, and is a tensor of shape [2]",
    ),
    Answer("nothing returned", {"return " + EXPOSED: EXPOSED}, "is None, and should be"),
    Answer("a function returned", {EXPOSED: "lambda: 0"}, "is <function"),
    Answer("number without end", {EXPOSED: "10**400"}, "which is too large"),
    Answer(
        "communication is computing", {BUSY: "if event.rank == rank]"}, "only events for which event.computes is true"
    ),
    Answer("all ranks compute", {BUSY: "if event.computes]"}, "take only those of the rank that is asked for"),
    Answer(
        "only backwards",
        {BUSY: "if event.rank == rank and event.kind == 'backward']"},
        "forwards and the optimizer's step are computations, too",
    ),
    Answer("joined when all had joined", {"(event.asked, event.end)": "(event.start, event.end)"}, "is event.asked"),
    Answer(
        "joined when it began to wait",
        {"(event.asked, event.end)": "(event.waited or event.start, event.end)"},
        "it had joined before, and went on computing",
    ),
    Answer(
        "grouped by rank",
        {
            "return [" + SEEN: "return list(map(list, zip(*[" + SEEN,
            "for number in numbers]": "for number in numbers])))",
        },
        "group them by all-reduce (event.number)",
    ),
    Answer(
        "in the order of the events",
        {"sorted(reduces, key=lambda event: event.rank)": "reduces"},
        "in no order that you can rely on: sort them",
    ),
    Answer(
        "events instead of spans", {"(event.asked, event.end)": "event"}, "should be made of lists, pairs and numbers"
    ),
    Answer("waiting beside travelling", {WAITING: "exposed(waits, busy)"}, "counted also while something travels"),
    Answer(
        "nothing hides", {"exposed(travels, busy)": "seconds(travels)"}, "also where it is hidden behind computation"
    ),
    Answer(
        "hidden and exposed change places",
        {FOUND: "(communication, hidden(travels, busy), waiting, bound(trace.makespan, communication, waiting))"},
        "hidden and exposed communication have changed places",
    ),
    Answer(
        "waits and travels change places",
        {"return found\n": "return [(hides, wait, talk, by) for hides, talk, wait, by in found]\n"},
        "communication and waiting have changed places",
    ),
    Answer(
        "the step is what a rank computes",
        {"bound(trace.makespan,": "bound(seconds(busy),"},
        "the step's seconds are trace.makespan",
    ),
    Answer(
        "always rank 0",
        {"busy = computing(trace, rank)": "rank = 0\n        busy = computing(trace, 0)"},
        "has the parts of rank 0",
    ),
    Answer(
        "the library's own",
        {"busy = computing(trace, rank)": "busy = trace.computing[rank]"},
        "the point is to write it yourself",
    ),
]
