from answers import Answer

LOOP = "        for peer in range(1, comms.world_size):\n"
ADD = "            tensor.add_(comms.recv_tensor(tensor.shape, peer, tensor.dtype))\n"
SEND = "            comms.send_tensor(tensor, peer)\n"
GO = "        comms.send_tensor(tensor, 0)\n"
BACK = "        tensor.copy_(comms.recv_tensor(tensor.shape, 0, tensor.dtype))\n"

WHOLE = "    if comms.rank == 0:\n" + LOOP + ADD + LOOP + SEND + "    else:\n" + GO + BACK
CHAIN = """    rank, ranks = comms.rank, comms.world_size
    if rank + 1 < ranks:
        tensor.add_(comms.recv_tensor(tensor.shape, rank + 1, tensor.dtype))
    if rank:
        comms.send_tensor(tensor, rank - 1)
        tensor.copy_(comms.recv_tensor(tensor.shape, rank - 1, tensor.dtype))
    if rank + 1 < ranks:
        comms.send_tensor(tensor, rank + 1)
"""

ANSWERS = [
    Answer("nothing comes back", {LOOP + SEND: "", BACK: ""}, "every rank needs it", True),
    Answer(
        "not in place", {ADD: ADD.replace("tensor.add_(", "tensor = tensor + (")}, "rank 0 still holds its own numbers"
    ),
    Answer(
        "added to the own numbers", {"tensor.copy_(": "tensor.add_("}, "which are in it already: replace them", True
    ),
    Answer("sum sent too early", {LOOP + ADD + LOOP + SEND: LOOP + ADD + SEND}, "only when the last tensor has come"),
    Answer("replaced instead of added", {"tensor.add_(": "tensor.copy_("}, "do not replace what is there"),
    Answer(
        "mean instead of sum",
        {LOOP + SEND: "        tensor.copy_(tensor / comms.world_size)\n" + LOOP + SEND},
        "this is the mean",
    ),
    Answer("everybody receives first", {GO + BACK: BACK + GO}, "every rank waits for another"),
    Answer("rank 0 sends first", {LOOP + ADD + LOOP + SEND: LOOP + SEND + LOOP + ADD}, "both ranks wait in send"),
    Answer("last rank forgotten", {LOOP + ADD: LOOP.replace("size)", "size - 1)") + ADD}, "waits in send"),
    Answer(
        "dtype forgotten", {"tensor.shape, peer, tensor.dtype": "tensor.shape, peer"}, "unless it is told the dtype"
    ),
    Answer(
        "everybody to everybody",
        {
            "    if comms.rank == 0:\n" + LOOP + ADD + LOOP + SEND + "    else:\n" + GO + BACK: (
                "    mine = tensor.clone()\n"
                "    for middle in range(comms.world_size):\n"
                "        for peer in range(comms.world_size):\n"
                "            if comms.rank == middle != peer:\n"
                "                comms.send_tensor(mine, peer)\n"
                "            elif comms.rank == peer != middle:\n"
                "                tensor.add_(comms.recv_tensor(tensor.shape, middle, tensor.dtype))\n"
            )
        },
        "12 messages were sent, 576 bytes; through rank 0, 6 messages",
    ),
    Answer(
        "the library's own",
        {GO + BACK: "        comms.all_reduce(tensor)\n"},
        "comms.all_reduce is not for this exercise",
    ),
    Answer("a chain", {WHOLE: CHAIN}, "rank 3 sends to rank 2: here everything goes through rank 0"),
    Answer(
        "no messages at all",
        {
            WHOLE: "    from microparallel.learn.graders._collectives import contribution\n"
            "    own = [contribution(rank, tuple(tensor.shape), tensor.dtype) for rank in range(comms.world_size)]\n"
            "    tensor.copy_(torch.stack(own).sum(0))\n"
        },
        "0 messages were sent, and 6 are needed",
    ),
    Answer(
        "another dtype",
        {LOOP + SEND: LOOP + SEND + "        tensor.data = tensor.to(torch.float16)\n"},
        "has dtype float16, and should have float32",
    ),
]
