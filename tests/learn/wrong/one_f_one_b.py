from answers import Answer

SEND = "requests.append(comms.isend(tensor, dest))"
WAIT = "    for request in requests:\n        request.wait()\n"
WARM_UP = "min(comms.world_size - 1 - rank, microbatches)"
STEADY = "        forward(warm_up + m)\n        backward(m)\n"
COOL_DOWN = "    for m in range(microbatches - warm_up, microbatches):\n        backward(m)\n"

ANSWERS = [
    Answer(
        "blocking sends", {SEND: "comms.send_tensor(tensor, dest)"}, "wait in send, and nobody receives", quick=True
    ),
    Answer("waited for at once", {SEND: "comms.isend(tensor, dest).wait()"}, "wait in send, and nobody receives"),
    Answer("request not kept", {SEND: "comms.isend(tensor, dest)"}, "never waited for it: keep the request"),
    Answer("requests not waited for", {WAIT: ""}, "never waited for it: keep the request", quick=True),
    Answer(
        "only the last request waited for",
        {WAIT: "    if requests:\n        requests[-1].wait()\n"},
        "never waited for it: keep the request",
    ),
    Answer(
        "warm-up one too long",
        {WARM_UP: "min(comms.world_size - rank, microbatches)"},
        "rank 0, with 2 ranks behind it, does 4 forwards before its first backward, and 3 are enough",
    ),
    Answer(
        "warm-up one too short",
        {WARM_UP: "min(max(comms.world_size - 2 - rank, 0), microbatches)"},
        "does 2 forwards before its first backward, and should do 3",
    ),
    Answer(
        "warm-up counted from the wrong end",
        {WARM_UP: "min(rank, microbatches)"},
        "rank 0 waits for a gradient after F0.0, where 1F1B goes on with F0.1",
    ),
    Answer("warm-up not clamped", {WARM_UP: "comms.world_size - 1 - rank"}, "A warm-up is never longer than that"),
    Answer(
        "warm-up not clamped, and the parts in a list",
        {
            WARM_UP: "comms.world_size - 1 - rank",
            "parts, answers =": "parts, answers = [], []\n    parts[:], answers[:] =",
        },
        "A warm-up is never longer than that",
    ),
    Answer(
        "a list of its own that is too short",
        {"    requests = []": "    [0][comms.world_size]\n    requests = []"},
        "with IndexError: list index out of range",
    ),
    Answer("that is GPipe", {WARM_UP: "microbatches"}, "that is GPipe, and keeps all activations"),
    Answer("no cool-down", {COOL_DOWN: ""}, "Those of the last ones are still to be done when no forward is left"),
    Answer(
        "backward before forward",
        {STEADY: "        backward(m)\n        forward(warm_up + m)\n"},
        "rank 2 begins the backward of micro-batch 0 and has nothing kept for it",
    ),
    Answer("activations not freed", {"kept.pop(m)": "kept[m]"}, "still holds what"),
    Answer(
        "the wrong micro-batch's activation",
        {"kept.pop(m)": "kept.pop(max(kept))"},
        "does the backward of micro-batch 1 with the gradient of micro-batch 0",
    ),
    Answer(
        "loss not divided",
        {"loss_function(outputs, answers[m]) * len(answers[m]) / len(targets)": "loss_function(outputs, answers[m])"},
        "were added up and not divided",
    ),
    Answer(
        "the loss as a text",
        {"return total if is_last else None": "return str(total) if is_last else None"},
        "should be a number, and is 'tensor(",
    ),
]
