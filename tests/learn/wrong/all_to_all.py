from answers import Answer

START = "    requests = [comms.isend(parts[peer], peer) for peer in peers if len(parts[peer])]\n"
OWN = "    received[comms.rank] = parts[comms.rank]\n"
WAIT = "    for request in requests:\n        request.wait()\n"
SORT = "ranks.argsort(stable=True)"
COMING = "    coming = torch.cat(exchange(one_each, [1] * comms.world_size, comms)).tolist()\n"
COMPUTE = (
    "    arrived = exchange(parts, coming, comms)\n    outputs = expert(torch.cat(arrived))\n"
    "    returned = exchange(list(outputs.split(coming)), counts, comms)\n"
)
PLACE = "    result[order] = torch.cat(returned)\n"
ORDER = "    order, counts = sort_by_rank(ranks, comms.world_size)\n"

ANSWERS = [
    Answer(
        "all ranks send first",
        {
            START: "    for peer in peers:\n        if len(parts[peer]):\n"
            "            comms.send_tensor(parts[peer], peer)\n",
            WAIT: "",
        },
        "in send, and no rank receives",
        quick=True,
    ),
    Answer(
        "all ranks receive first",
        {START: "", WAIT: START + WAIT},
        "in receive, and no rank sends: every rank waits for another",
    ),
    Answer("nobody waits for the sends", {WAIT: ""}, "and never waited for it"),
    Answer(
        "the own part lost",
        {OWN: ""},
        "place 0 of what exchange returns should be this rank's own part, 2 rows, and has 0",
    ),
    Answer(
        "sent to itself",
        {"if rank != comms.rank]": "]"},
        "which is itself: what a rank has, it need not send",
    ),
    Answer(
        "only the next rank's part",
        {"received[peer] = comms.recv": "received[-peer] = comms.recv"},
        "place r is for what rank r has sent",
    ),
    Answer("no minlength", {"minlength=world_size": ""}, "bincount has an argument minlength", quick=True),
    Answer("sorted backwards", {SORT: "ranks.argsort(descending=True)"}, "those for rank 0 come first"),
    Answer(
        "counts not exchanged",
        {COMING: "    coming = counts\n"},
        "let every rank tell every other its count first",
        quick=True,
    ),
    Answer(
        "equal counts taken for granted",
        {COMING: "    coming = [len(tokens) // comms.world_size] * comms.world_size\n"},
        "let every rank tell every other its count first",
    ),
    Answer(
        "left in the order of ranks",
        {PLACE: "    result = torch.cat(returned)\n"},
        "put each in the place of its token",
    ),
    Answer(
        "sorted once more",
        {PLACE: "    result = torch.cat(returned)[order]\n"},
        "the outputs were sorted once more instead of back",
    ),
    Answer(
        "computed at home",
        {COMPUTE: "    returned = [expert(part) for part in parts]\n"},
        "every token was computed by this rank's own expert: none was sent away",
    ),
    Answer(
        "not computed",
        {"outputs = expert(torch.cat(arrived))": "outputs = torch.cat(arrived)"},
        "these are the tokens as they were: no expert has computed them",
    ),
    Answer(
        "without tokens, home at once",
        {ORDER: "    if not len(tokens):\n        return tokens\n" + ORDER},
        "a rank without tokens: a rank waits for one that has finished",
        quick=True,
    ),
    Answer(
        "everything to everybody",
        {
            COMPUTE: "    all_counts = exchange([torch.tensor(counts)] * comms.world_size, "
            "[comms.world_size] * comms.world_size, comms)\n"
            "    everything = exchange([tokens[order]] * comms.world_size, "
            "[int(one.sum()) for one in all_counts], comms)\n"
            "    mine = [one.split(sizes.tolist())[comms.rank] for one, sizes in zip(everything, all_counts)]\n"
            "    returned = exchange(list(expert(torch.cat(mine)).split(coming)), counts, comms)\n"
        },
        "send every token to its expert's rank alone",
    ),
    Answer(
        "our own all-to-all",
        {COMING: "    coming = [int(one) for one in comms.all_to_all(one_each)]\n"},
        "comms.all_to_all is not for this exercise",
    ),
]
