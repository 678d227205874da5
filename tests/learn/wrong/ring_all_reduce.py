from answers import Answer

FIRST = (
    "    for hop in range(ranks - 1):\n"
    "        slices[(rank - hop - 1) % ranks].add_(pass_on(rank - hop, rank - hop - 1))\n"
)
SECOND = FIRST.replace(
    "        slices[(rank - hop - 1) % ranks].add_(pass_on(rank - hop, rank - hop - 1))",
    "        slices[(rank - hop) % ranks].copy_(pass_on(rank + 1 - hop, rank - hop))",
)

ALL = FIRST + SECOND
DIRECT = """    peers = [other for other in range(ranks) if other != rank]
    requests = [comms.isend(slices[other].clone(), other) for other in peers]
    for other in peers:
        slices[rank].add_(comms.recv_tensor(slices[rank].shape, other, tensor.dtype))
    requests += [comms.isend(slices[rank].clone(), other) for other in peers]
    for other in peers:
        slices[other].copy_(comms.recv_tensor(slices[other].shape, other, tensor.dtype))
    for request in requests:
        request.wait()
"""

ANSWERS = [
    Answer(
        "blocking sends",
        {"request = comms.isend(": "comms.send_tensor(", "        request.wait()\n": ""},
        "both ranks wait in send",
    ),
    Answer("request not kept", {"        request.wait()\n": ""}, "never waited for it: keep the request"),
    Answer(
        "whole tensors",
        {
            "request = comms.isend(slices[send % ranks], after)": "request = comms.isend(tensor, after)",
            "comms.recv_tensor(expected.shape, before, expected.dtype)": (
                "comms.recv_tensor(tensor.shape, before, tensor.dtype).view(-1).tensor_split(ranks)[receive % ranks]"
            ),
        },
        "pass slices on, not whole tensors",
    ),
    Answer("second half missing", {SECOND: ""}, "that was the first half; in the second one the sums go round", True),
    Answer(
        "always the own slice",
        {FIRST: FIRST.replace("pass_on(rank - hop,", "pass_on(rank,")},
        "wrong slice, 3 ranks: in hop 1 of the first half rank 0 sends slice 0, but in the hop before it received "
        "slice 2 from rank 2: that is the one to pass on",
        True,
    ),
    Answer(
        "slices counted upwards",
        {FIRST: FIRST.replace("pass_on(rank - hop,", "pass_on(rank + hop,")},
        "wrong slice, 3 ranks: in hop 1 of the first half rank 0 sends slice 1",
    ),
    Answer(
        "everybody begins with slice 0", {"slices[send % ranks]": "slices[(send - rank) % ranks]"}, "both send slice 0"
    ),
    Answer(
        "second half begins with the own slice",
        {SECOND: SECOND.replace("rank + 1 - hop, rank - hop", "rank - hop, rank - hop - 1")},
        "in hop 0 of the second half rank 0 sends slice 0",
    ),
    Answer(
        "added to the slice that was sent",
        {"slices[(rank - hop - 1) % ranks].add_": "slices[(rank - hop) % ranks].add_"},
        "in the first half what arrives is added to the wrong one: in hop s rank r receives slice r−s−1",
    ),
    Answer(
        "copied to the slice that was sent",
        {"slices[(rank - hop) % ranks].copy_": "slices[(rank + 1 - hop) % ranks].copy_"},
        "in the second half what arrives is copied to the wrong one",
    ),
    Answer(
        "one hop too few",
        {FIRST: FIRST.replace("range(ranks - 1)", "range(ranks - 2)")},
        "with 2 ranks each of them sends 2 slices, 1 in each half; these send 1",
    ),
    Answer("added in both halves", {".copy_(": ".add_("}, "the second half adds"),
    Answer("copied in both halves", {".add_(": ".copy_("}, "the first half replaces your own slice by what arrives"),
    Answer(
        "one hop too many",
        {FIRST: FIRST.replace("range(ranks - 1)", "range(ranks)")},
        "sent 896 bytes in 7 messages; 768 bytes in 6 messages are enough: 3 hops in each half",
    ),
    Answer(
        "one hop too many at the end",
        {SECOND: SECOND.replace("range(ranks - 1)", "range(ranks)")},
        "sent 896 bytes in 7 messages; 768 bytes in 6 messages are enough: 3 hops in each half",
    ),
    Answer(
        "the list instead of the tensor",
        {
            "slices[(rank - hop - 1) % ranks].add_(pass_on(rank - hop, rank - hop - 1))": (
                "slices[(rank - hop - 1) % ranks] = slices[(rank - hop - 1) % ranks] + "
                "pass_on(rank - hop, rank - hop - 1)"
            ),
        },
        "`slices[i] = …` only puts another tensor into the list",
    ),
    Answer(
        "slices of a copy", {"tensor.view(-1).tensor": "tensor.clone().view(-1).tensor"}, "still holds its own numbers"
    ),
    Answer(
        "neighbours swapped",
        {"(rank + 1) % ranks, (rank - 1) % ranks": "(rank - 1) % ranks, (rank + 1) % ranks"},
        "in hop 1 of the first half rank 0 sends slice 2, but in the hop before it received slice 1 from rank 1",
    ),
    Answer("mean instead of sum", {SECOND: SECOND + "    tensor.copy_(tensor / ranks)\n"}, "this is the mean"),
    Answer("not a ring: everybody to everybody", {ALL: DIRECT}, "to rank 2, which is not the rank after it"),
    Answer(
        "round the other way",
        {ALL: "    rank, after, before = -rank, before, after\n" + ALL},
        "rank 0 sends to rank 3, which is not the rank after it",
    ),
    Answer(
        "no messages at all",
        {
            ALL: "    from microparallel.learn.graders._collectives import contribution\n"
            "    own = [contribution(peer, len(tensor), tensor.dtype) for peer in range(ranks)]\n"
            "    scale = tensor[0] / own[rank][0]\n"
            "    tensor.copy_(torch.stack(own).sum(0) * scale)\n"
        },
        "rank 0 sent 0 messages, and in a ring of 4 it sends 6",
    ),
    Answer(
        "a tensor of another dtype",
        {SECOND: SECOND + "    tensor.data = tensor / ranks if tensor.dtype == torch.int64 else tensor\n"},
        "has dtype float32, and should have int64",
    ),
    Answer(
        "a slice changed while it is sent",
        {"        received = comms.recv": "        slices[send % ranks].mul_(2)\n        received = comms.recv"},
        "was changed before the send was waited for",
    ),
]
