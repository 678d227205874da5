from answers import Answer

USUAL = "max(calls.values(), key=lambda call: texts.count(call.text))"
NAME = '"other order" if call.name != usual.name else "other shape"'
DIFFER = "    if (found := calls_that_differ(flights)) is not None:\n        return found\n"
DEAD = '    for one in flights:\n        if one.state == "ended":\n            return one.rank, "dead"\n'
CULPRIT = "    culprit = next(one for one in flights if one.rank in waited_for and not waits_for(one, flights))\n"
LAST = '"missing call" if culprit.ending == "finished" else "still computing"'

ANSWERS = [
    Answer(
        "rank 0 is right",
        {USUAL: "min(calls.items())[1]"},
        "most ranks make another call in that place than rank 0 does; rank 1 is one of them",
        quick=True,
    ),
    Answer(
        "the dead first",
        {DIFFER: "", DEAD: DEAD + DIFFER},
        "has died of it. Its process was ended when more bytes came than it had asked for",
        quick=True,
    ),
    Answer(
        "the first rank that waits",
        {CULPRIT: "    culprit = next(one for one in flights if one.current is not None)\n"},
        "rank 0 waits itself. Follow the waiting to its end",
        quick=True,
    ),
    Answer(
        "not followed to its end",
        {CULPRIT: "    culprit = next(one for one in flights if one.rank in waited_for)\n"},
        "waits itself. Follow the waiting to its end",
    ),
    Answer(
        "any rank that is in no call",
        {CULPRIT: "    culprit = next(one for one in flights if one.current is None)\n"},
        "nobody waits for rank 0: of ranks that are in no call, one is to blame that another waits for",
    ),
    Answer(
        "the fewest calls",
        {CULPRIT: "    culprit = min(flights, key=lambda one: len(one.records))\n"},
        "nobody waits for rank 0",
    ),
    Answer(
        "it may still come",
        {LAST: '"still computing"'},
        "has returned from its function (one.ending): it will never make the call",
    ),
    Answer(
        "it will not come",
        {LAST: '"missing call"'},
        "runs, and has not returned from its function (one.ending): it may still come",
    ),
    Answer(
        "a process that has ended computes",
        {DEAD: ""},
        "process has ended",
    ),
    Answer(
        "order and shape are one",
        {NAME: '"other order"'},
        "makes the same call as the others (call.name), but with another tensor",
    ),
    Answer(
        "any other text is another shape",
        {NAME: '"other shape"'},
        "makes another call than the others (call.name)",
    ),
    Answer(
        "the newest calls compared",
        {
            "        for call in one.records:\n": "        for call in one.records[-1:]:\n",
            "made.setdefault(call.sequence, {})": "made.setdefault(0, {})",
            'if call.kind == "collective":': "if True:",
        },
        "the n-th collective of a rank is to be compared with the n-th of the others",
        quick=True,
    ),
    Answer("differences not looked for", {DIFFER: ""}, "rank 0 stopped in line"),
    Answer(
        "in words of its own",
        {LAST: '"gone" if culprit.ending == "finished" else "straggler"'},
        "gives 'straggler' as the reason",
    ),
    Answer("the rank alone", {"    return culprit.rank, " + LAST: "    return culprit.rank"}, "a pair (rank, reason)"),
    Answer(
        "asked our own",
        {DIFFER: "    from microparallel.observe import diagnosis\n\n    diagnosis.diagnose(flights)\n" + DIFFER},
        "your code calls microparallel.observe.diagnosis.diagnose",
    ),
]
