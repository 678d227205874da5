from answers import Answer

FIRST = "send, receive = (rank - hop - 1) % ranks, (rank - hop - 2) % ranks"
SECOND = "send, receive = (rank - hop) % ranks, (rank - hop - 1) % ranks"
ADD = "slices[receive].add_(pass_on(slices[send], slices[receive], comms))"
COPY = "slices[receive].copy_(pass_on(slices[send], slices[receive], comms))"
LOOP = "    for hop in range(ranks - 1):\n        "
DIRECT = """    peers = [other for other in range(ranks) if other != rank]
    requests = [comms.isend(slices[other].clone(), other) for other in peers]
    for other in peers:
        slices[rank].add_(comms.recv_tensor(slices[rank].shape, other, tensor.dtype))
    for request in requests:
        request.wait()
"""

ANSWERS = [
    Answer(
        "sends before receives",
        {"request = comms.isend(": "comms.send_tensor(", "    request.wait()\n": ""},
        "both ranks wait in send, and no rank receives; see the deadlock in docs/data_parallel/06_all_reduce.md",
        True,
    ),
    Answer(
        "receives before sends",
        {
            "    request = comms.isend(outgoing, after)\n": "",
            "    request.wait()\n": "    comms.send_tensor(outgoing, after)\n",
        },
        "both ranks wait in receive, and no rank sends",
    ),
    Answer("request not kept", {"    request.wait()\n": ""}, "never waited for it: keep the request"),
    Answer(
        "off by one, as in the ring all-reduce",
        {FIRST: SECOND},
        "rank 0 ends with the whole sum of slice 1, and should have that of slice 0. (In the ring all-reduce rank r "
        "has slice r+1 after the first half; here it is slice r.)",
        True,
    ),
    Answer(
        "off by one the other way",
        {FIRST: "send, receive = (rank - hop - 2) % ranks, (rank - hop - 3) % ranks"},
        "2 ranks: rank 0 ends with the whole sum of slice 1, and should have that of slice 0",
    ),
    Answer(
        "slices counted upwards",
        {FIRST: "send, receive = (rank + hop + 1) % ranks, (rank + hop + 2) % ranks"},
        "in hop 1 of the reduce-scatter rank 0 sends slice 2, but in the hop before it received slice 0",
    ),
    Answer(
        "always the same slice",
        {FIRST: "send, receive = (rank - 1) % ranks, (rank - hop - 2) % ranks"},
        "in hop 1 of the reduce-scatter rank 0 sends slice 2, but in the hop before it received slice 1 from rank 2",
    ),
    Answer(
        "everybody begins with slice 0",
        {"slices[receive].add_(pass_on(slices[send],": "slices[receive].add_(pass_on(slices[-hop % ranks],"},
        "both send slice 0; each rank begins with another one, rank r with slice r−1",
    ),
    Answer(
        "added to the slice that was sent",
        {ADD: ADD.replace("slices[receive].add_", "slices[send].add_")},
        "what arrives is added to the wrong one: in hop s of the reduce-scatter rank r receives slice r−s−2",
    ),
    Answer("copies in the first half", {ADD: ADD.replace("add_", "copy_")}, "what arrives replaces your own slice"),
    Answer("adds in the second half", {COPY: COPY.replace("copy_", "add_")}, "added to the old numbers", True),
    Answer(
        "the second half begins with slice r + 1",
        {SECOND: "send, receive = (rank + 1 - hop) % ranks, (rank - hop) % ranks"},
        "all-gather, 2 ranks: rank 0 begins with slice 1, which is old on it",
    ),
    Answer(
        "copied to the slice that was sent",
        {COPY: COPY.replace("slices[receive].copy_", "slices[send].copy_")},
        "what arrives is copied to the wrong one: in hop s of the all-gather rank r receives slice r−s−1",
    ),
    Answer(
        "one hop too few",
        {LOOP + FIRST: LOOP.replace("ranks - 1", "max(1, ranks - 2)") + FIRST},
        "reduce-scatter, 3 ranks: each sends 2 slices, one a hop; these send 1",
    ),
    Answer(
        "one hop too few in the second half",
        {LOOP + SECOND: LOOP.replace("ranks - 1", "max(1, ranks - 2)") + SECOND},
        "all-gather, 3 ranks: each sends 2 slices, one a hop; these send 1",
    ),
    Answer(
        "one hop too many",
        {LOOP + SECOND: LOOP.replace("ranks - 1", "ranks") + SECOND},
        "in the all-gather rank 0 sent 512 bytes in 4 messages; 384 bytes in 3 messages are enough",
    ),
    Answer(
        "a whole all-reduce",
        {ADD: ADD + "\n    all_gather(tensor, comms)"},
        "in the reduce-scatter rank 0 sent 768 bytes in 6 messages; 384 bytes in 3 messages are enough: 3 hops",
    ),
    Answer(
        "whole tensors",
        {
            ADD: "slices[receive].add_(slices_of(pass_on(tensor, tensor, comms), ranks)[receive])",
        },
        "pass slices on, not whole tensors",
    ),
    Answer(
        "the list instead of the tensor",
        {ADD: "slices[receive] = slices[receive] + pass_on(slices[send], slices[receive], comms)"},
        "`slices[i] = …` only puts another tensor into the list",
    ),
    Answer(
        "round the other way",
        {
            "(comms.rank + 1) % comms.world_size, (comms.rank - 1) % comms.world_size": (
                "(comms.rank - 1) % comms.world_size, (comms.rank + 1) % comms.world_size"
            )
        },
        "in hop 1 of the reduce-scatter rank 0 sends slice 1, but in the hop before it received slice 0 from rank 1",
    ),
    Answer("mean instead of sum", {ADD: ADD + "\n    slices[rank].copy_(slices[rank] / ranks)"}, "this is the mean"),
    Answer(
        "not a ring: everybody to everybody",
        {LOOP + FIRST + "\n        " + ADD + "\n": DIRECT},
        "this is not the ring: rank 0 sends to rank 2, which is not the rank after it",
    ),
    Answer(
        "parts of the same size, cut by hand",
        {"tensor.view(-1).tensor_split(ranks)": "tensor.view(-1)[: len(tensor) // ranks * ranks].chunk(ranks)"},
        "3 ranks, 7 numbers",
    ),
]
