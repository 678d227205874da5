from answers import Answer

BROADCAST = "        tensor.copy_(comms.recv_tensor(tensor.shape, src, tensor.dtype))\n"
BARRIER = "    gather(token, 0, comms)\n    broadcast(token, 0, comms)\n"
OWN = "tensor.clone() if rank == dst else comms.recv_tensor(tensor.shape, rank, tensor.dtype)"

ANSWERS = [
    Answer(
        "not in place",
        {BROADCAST: BROADCAST.replace("tensor.copy_(", "tensor = (")},
        "still holds its own tensor",
        True,
    ),
    Answer("src ignored", {"if comms.rank == src:": "src = 0\n    if comms.rank == src:"}, "look at src"),
    Answer(
        "dtype forgotten",
        {"recv_tensor(tensor.shape, src, tensor.dtype)": "recv_tensor(tensor.shape, src)"},
        "a receive expects float32 unless it is told the dtype",
    ),
    Answer("everybody receives", {"    else:\n" + BROADCAST: BROADCAST[4:]}, "recv_tensor with src=0, which is itself"),
    Answer(
        "to oneself as well",
        {"for peer in others(src, comms)": "for peer in range(comms.world_size)"},
        "send_tensor with dest=0, which is itself",
    ),
    Answer(
        "own tensor missing",
        {"in range(comms.world_size)\n    ]": "in others(dst, comms)\n    ]"},
        "its own is missing",
    ),
    Answer(
        "own tensor at the end",
        {
            "in range(comms.world_size)\n    ]": "in [*others(dst, comms), dst]\n    ]",
        },
        "place r is for rank r",
    ),
    Answer(
        "everybody returns a list",
        {"        return None\n": "        return [tensor]\n"},
        "shall return None, and returned",
    ),
    Answer("not a copy", {"tensor.clone() if": "tensor if"}, "put a clone into the list"),
    Answer("barrier one way", {BARRIER: "    gather(token, 0, comms)\n"}, "you must also wait for leave", True),
    Answer("barrier the other way", {BARRIER: "    broadcast(token, 0, comms)\n"}, "rank 0 never heard from everybody"),
    Answer(
        "leave is given too early",
        {
            BARRIER: "    for peer in others(0, comms):\n        if comms.rank == 0:\n"
            "            comms.recv_tensor(1, peer)\n            comms.send_tensor(token, peer)\n"
            "        elif comms.rank == peer:\n"
            "            comms.send_tensor(token, 0)\n            comms.recv_tensor(1, 0)\n"
        },
        "give leave only after it has heard from everybody",
    ),
    Answer(
        "everybody waits first",
        {
            BARRIER: "    for peer in others(comms.rank, comms):\n"
            "        comms.recv_tensor(1, peer)\n        comms.send_tensor(token, peer)\n"
        },
        "every rank waits for another",
    ),
    Answer(
        "every message confirmed",
        {
            "            comms.send_tensor(tensor, peer)\n": "            comms.send_tensor(tensor, peer)\n"
            "            comms.recv_tensor(1, peer)\n",
            BROADCAST: BROADCAST + "        comms.send_tensor(torch.zeros(1), src)\n",
        },
        "4 messages were sent (2 of them by rank 0), and 2 are enough",
    ),
    Answer("the library's own", {BARRIER: "    comms.barrier()\n"}, "comms.barrier is not for this exercise"),
]
