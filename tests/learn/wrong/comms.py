from answers import Answer

BROADCAST = "        tensor.copy_(comms.recv_tensor(tensor.shape, src, tensor.dtype))\n"
BARRIER = "    gather(token, 0, comms)\n    broadcast(token, 0, comms)\n"
OWN = "tensor.clone() if rank == dst else comms.recv_tensor(tensor.shape, rank, tensor.dtype)"

ROUND = """    if comms.world_size > 1 and comms.rank == 0:
        comms.send_tensor(token, 1)
        comms.recv_tensor(1, comms.world_size - 1)
    elif comms.world_size > 1:
        comms.recv_tensor(1, comms.rank - 1)
        comms.send_tensor(token, (comms.rank + 1) % comms.world_size)
"""
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
        "should return None, and returned",
    ),
    Answer("not a copy", {"tensor.clone() if": "tensor if"}, "put a clone into the list"),
    Answer(
        "barrier one way",
        {BARRIER: "    gather(token, 0, comms)\n"},
        "wait until rank 0 answers that all have arrived",
        True,
    ),
    Answer(
        "barrier the other way",
        {BARRIER: "    broadcast(token, 0, comms)\n"},
        "rank 0 answered, but it never heard from all others",
    ),
    Answer(
        "the answer is given too early",
        {
            BARRIER: "    for peer in others(0, comms):\n        if comms.rank == 0:\n"
            "            comms.recv_tensor(1, peer)\n            comms.send_tensor(token, peer)\n"
            "        elif comms.rank == peer:\n"
            "            comms.send_tensor(token, 0)\n            comms.recv_tensor(1, 0)\n"
        },
        "answer only after it has heard from all others",
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
        "6 messages were sent (3 of them by rank 0), and 3 are enough",
    ),
    Answer("the library's own", {BARRIER: "    comms.barrier()\n"}, "comms.barrier is not for this exercise"),
    Answer("barrier round the ring once", {BARRIER: ROUND}, "the token must go round a second time"),
    Answer(
        "barrier that trusts a send to wait",
        {BARRIER: "    broadcast(token, 0, comms)\n    broadcast(token, 0, comms)\n"},
        "rank 0 may only go on when it has heard from all others",
    ),
    Answer(
        "patience instead of messages",
        {BARRIER: "    import time\n\n    time.sleep(0.1)\n"},
        "no rank has sent anything, so none can know about another",
    ),
    Answer(
        "broadcast of numbers that all know",
        {
            "    if comms.rank == src:\n": "    tensor.copy_(torch.arange(6).reshape(2, 3) + 100 * (src + 1))\n"
            "    if tensor.dim() == 2:\n        return\n    if comms.rank == src:\n"
        },
        "rank 1 received 0 messages, and should receive 1",
    ),
    Answer(
        "gather returns a number",
        {"    return [\n        tensor.clone()": "    return 5\n    return [\n        tensor.clone()"},
        "should return a list of tensors, and returned 5",
    ),
    Answer(
        "gather returns a list of numbers",
        {"    return [\n        tensor.clone()": "    return [1, 2, 3, 4]\n    return [\n        tensor.clone()"},
        "tensor 0 of its list should be a tensor, and is 1",
    ),
    Answer(
        "gather returns what cannot travel",
        {"        return None\n": "        return lambda: None\n"},
        "should return None, and returned <function",
    ),
]
