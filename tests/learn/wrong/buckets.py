from answers import Answer

START = '            bucket.request = self.comms.all_reduce(bucket.buffer, op="mean", async_op=True)\n'
LATE = "            if bucket.request is None:\n    " + START
FULL = "        if bucket.ready == len(bucket.parameters):\n"
BACK = "                parameter.grad = bucket.views[parameter].clone()\n"
WAIT = "            bucket.request.wait()\n"
GROUP = "        if sum(one.numel() for one in groups[-1]) >= numbers:\n            groups.append([])\n"

ANSWERS = [
    Answer(
        "filled from the front",
        {"in reversed(parameters)": "in parameters"},
        "from the last parameter to the first",
        True,
    ),
    Answer(
        "last bucket forgotten",
        {
            "    return groups\n": (
                "    return [group for group in groups if sum(one.numel() for one in group) >= numbers]\n"
            )
        },
        "no bucket has 0.bias, 0.weight: the last bucket leaves too",
    ),
    Answer(
        "closed too early",
        {GROUP: GROUP.replace("groups[-1])", "[*groups[-1], parameter])").replace(">= n", "> n")},
        "the one that fills it still belongs to it",
    ),
    Answer("closed too late", {GROUP: GROUP.replace(">= n", "> n")}, "when it has that many, it takes no more"),
    Answer(
        "empty last bucket",
        {GROUP: "", "        groups[-1].append(parameter)\n": "        groups[-1].append(parameter)\n" + GROUP},
        "is empty: begin a new one only when a parameter goes into it",
    ),
    Answer(
        "leaves with every gradient",
        {FULL: "        if True:\n"},
        "6 messages for 3 buckets (6 gradients), and 3 are enough",
    ),
    Answer("leaves in finish", {FULL + START: ""}, "the first bucket leaves after backward is over", True),
    Answer(
        "not asynchronous", {FULL + START: FULL + START.replace(", async_op=True", "")}, "Start it with async_op=True"
    ),
    Answer("waits in the hook", {FULL + START: FULL + START + WAIT}, "nothing overlaps; wait in finish()"),
    Answer(
        "one gradient too early", {FULL: FULL.replace("parameters)", "parameters) - 1")}, "before 4.weight has come"
    ),
    Answer("not waited for", {WAIT: ""}, "3 of 3 all-reduces were under way"),
    Answer(
        "missing division by world size", {'buffer, op="mean"': "buffer"}, "this is the sum: divide by the world size"
    ),
    Answer("nothing handed back", {BACK: "                pass\n"}, "nothing came back from the buckets"),
    Answer(
        "handed back before the wait", {WAIT: "", BACK: BACK + WAIT}, "copy the averages out of them, after the wait"
    ),
    Answer(
        "views emptied",
        {"bucket.views[parameter].clone()": "bucket.views[parameter]"},
        "is a view of the bucket's buffer",
    ),
    Answer(
        "nothing put in",
        {"        bucket.views[parameter].copy_(parameter.grad)\n": ""},
        "was never put into its bucket",
    ),
    Answer(
        "count not reset",
        {"bucket.ready, bucket.request = 0, None": "bucket.request = None"},
        "something of step 1 is still in",
    ),
    Answer(
        "request not reset",
        {"bucket.ready, bucket.request = 0, None": "bucket.ready = 0"},
        "requests of the step before, which are long over",
    ),
    Answer(
        "buffer not emptied",
        {"            bucket.buffer.zero_()\n": ""},
        "spare.weight, spare.bias: this is the average of the step before",
    ),
    Answer("unused parameters forgotten", {LATE: ""}, "finish() waits for a bucket that never left"),
    Answer(
        "bucket left behind",
        {LATE: "            if bucket.request is None:\n                continue\n"},
        "must leave in finish()",
    ),
    Answer(
        "parameters instead of gradients",
        {"copy_(parameter.grad)": "copy_(parameter.data)"},
        "these are the weights: it is parameter.grad",
    ),
    Answer(
        "another order on every rank",
        {
            "        for bucket in self.buckets:\n": (
                "        for bucket in self.buckets if self.comms.rank == 0 else self.buckets[::-1]:\n"
            )
        },
        "Let gradients (or buckets) leave in the same order on every rank",
    ),
    Answer(
        "no groups",
        {"    return groups\n": "    return None\n"},
        "in_buckets should return a list of lists of parameters, and returned None",
    ),
    Answer(
        "numbers instead of parameters",
        {"    return groups\n": "    return [1, 2]\n"},
        "in_buckets should return a list of lists of parameters, and returned [1, 2]",
    ),
    Answer(
        "not in lists",
        {"    return groups\n": "    return parameters[::-1]\n"},
        "in_buckets should return a list of lists of parameters",
    ),
]
