from answers import Answer

LEVELS = (
    "    mine = next(ranks for ranks in hosts if comms.rank in ranks)\n"
    "    reduce_inside(tensor, mine, comms)\n"
    "    if comms.rank == mine[0]:\n"
    "        all_reduce_between(tensor, [ranks[0] for ranks in hosts], comms)\n"
    "    spread_inside(tensor, mine, comms)\n"
)
BETWEEN = "    reduce_inside(tensor, leaders, comms)\n    spread_inside(tensor, leaders, comms)\n"
EXCHANGE = (
    "    other = next((rank for rank in leaders if rank != comms.rank), None)\n    if other is None:\n        return\n"
)
RING = """    ranks, rank = comms.world_size, comms.rank
    slices = list(tensor.view(-1).tensor_split(ranks))

    def pass_on(send, receive):
        request = comms.isend(slices[send % ranks], (rank + 1) % ranks)
        came = comms.recv_tensor(slices[receive % ranks].shape, (rank - 1) % ranks, tensor.dtype)
        request.wait()
        return came

    for step in range(ranks - 1):
        slices[(rank - step - 1) % ranks].add_(pass_on(rank - step, rank - step - 1))
    for step in range(ranks - 1):
        slices[(rank - step) % ranks].copy_(pass_on(rank + 1 - step, rank - step))
"""

ANSWERS = [
    Answer(
        "a ring through all ranks",
        {LEVELS: RING},
        "1440 bytes in 12 messages cross between the hosts, and 960 bytes are enough",
        quick=True,
    ),
    Answer(
        "everything through rank 0",
        {
            LEVELS: "    everybody = list(range(comms.world_size))\n    reduce_inside(tensor, everybody, comms)\n"
            "    spread_inside(tensor, everybody, comms)\n"
        },
        "ranks 0, 2, 3 send whole tensors to another host: add up inside each host first",
    ),
    Answer(
        "every leader to every leader",
        {
            BETWEEN: "    own = tensor.clone()\n"
            "    leaving = [comms.isend(own, other) for other in leaders if other != comms.rank]\n"
            "    tensor.zero_()\n"
            "    for other in leaders:\n"
            "        mine = other == comms.rank\n"
            "        tensor.add_(own if mine else comms.recv_tensor(tensor.shape, other, tensor.dtype))\n"
            "    for request in leaving:\n"
            "        request.wait()\n"
        },
        "ranks 0, 2, 3 speak for their hosts, as they should, but too often: let one of them add up",
    ),
    Answer(
        "nothing between the hosts",
        {BETWEEN: "    pass\n"},
        "rank 0 has the sum of its own host, ranks 0, 1, and of no other",
        quick=True,
    ),
    Answer(
        "in one direction only",
        {BETWEEN: "    reduce_inside(tensor, leaders, comms)\n"},
        "rank 2 has the sum of its own host, ranks 2, 3, and of no other",
    ),
    Answer(
        "not spread inside",
        {LEVELS: LEVELS.replace("    spread_inside(tensor, mine, comms)\n", "")},
        "rank 1 still holds its own numbers, though rank 0 has the whole sum: spread it inside each host",
    ),
    Answer(
        "both leaders send first",
        {
            BETWEEN: EXCHANGE + "    comms.send_tensor(tensor, other)\n"
            "    tensor.add_(comms.recv_tensor(tensor.shape, other, tensor.dtype))\n"
        },
        "rank 0 waits in send (line 56) until rank 2 receives",
        quick=True,
    ),
    Answer(
        "the other host's sum replaces ours",
        {
            BETWEEN: EXCHANGE + "    request = comms.isend(tensor, other)\n"
            "    came = comms.recv_tensor(tensor.shape, other, tensor.dtype)\n    request.wait()\n"
            "    tensor.copy_(came)\n"
        },
        "rank 0 has only what ranks 2 and 3 put in, on another host",
    ),
    Answer(
        "added while it leaves",
        {
            BETWEEN: EXCHANGE + "    request = comms.isend(tensor, other)\n"
            "    tensor.add_(comms.recv_tensor(tensor.shape, other, tensor.dtype))\n    request.wait()\n"
        },
        "was changed before the send was waited for",
    ),
    Answer(
        "replaced inside",
        {
            "tensor.add_(comms.recv_tensor(tensor.shape, other, tensor.dtype))": (
                "tensor.copy_(comms.recv_tensor(tensor.shape, other, tensor.dtype))"
            )
        },
        "rank 0 has only rank 3's numbers: what came replaced what was there",
    ),
    Answer(
        "the result is added to",
        {"tensor.copy_(comms.recv_tensor(": "tensor.add_(comms.recv_tensor("},
        "every rank counts once; what is added must not be in the sum already",
    ),
    Answer(
        "hosts of equal size taken for granted",
        {
            LEVELS: LEVELS.replace(
                "next(ranks for ranks in hosts if comms.rank in ranks)",
                "list(range(comms.rank // len(hosts[0]) * len(hosts[0]), comms.world_size))[: len(hosts[0])]",
            )
        },
        "hosts [3, 0] and [2, 4, 1]",
    ),
    Answer(
        "two hosts taken for granted",
        {
            BETWEEN: EXCHANGE + "    request = comms.isend(tensor.clone(), other)\n"
            "    tensor.add_(comms.recv_tensor(tensor.shape, other, tensor.dtype))\n    request.wait()\n"
        },
        "hosts [0, 1] and [2] and [3, 4]: a rank waits for one that has finished",
    ),
    Answer(
        "a new tensor",
        {LEVELS: "    tensor = tensor.clone()\n" + LEVELS},
        "rank 0 still holds its own numbers: nothing was added to the tensor itself",
    ),
    Answer(
        "our own all-reduce",
        {LEVELS: "    comms.all_reduce(tensor)\n"},
        "comms.all_reduce is not for this exercise",
    ),
]
