from answers import Answer

SEND = "requests.append(comms.isend(tensor, dest))"
WAIT = "        for request in requests:\n            request.wait()\n"
WARM_UP = "min(ranks - 1 - rank, microbatches)"
PAIR = 'words += [f"F{warm_up + m}", f"B{m}"]'
LEFT = 'return words + [f"B{m}" for m in range(microbatches - warm_up, microbatches)]'
SHARE = "loss_function(outputs, answers[m]) * len(answers[m]) / len(targets)"
KEEP = "        kept[m] = received, outputs\n"

ANSWERS = [
    Answer(
        "warm-up one too long",
        {WARM_UP: "min(ranks - rank, microbatches)"},
        "rank 0, with 3 ranks behind it, does 5 forwards before its first backward, and 4 are enough",
        quick=True,
    ),
    Answer(
        "warm-up one too short",
        {WARM_UP: "min(max(ranks - 2 - rank, 0), microbatches)"},
        "does 3 forwards before its first backward, and should do 4",
    ),
    Answer(
        "warm-up counted from the wrong end",
        {WARM_UP: "min(rank, microbatches)"},
        "does 1 forward before its first backward, and should do 4",
    ),
    Answer("warm-up not clamped", {WARM_UP: "ranks - 1 - rank"}, "A warm-up is never longer than the number of"),
    Answer("that is GPipe", {WARM_UP: "microbatches"}, "that is GPipe, and keeps all activations"),
    Answer("no backwards left over", {LEFT: "return words"}, "rank 0 never does B3"),
    Answer(
        "the last backward forgotten",
        {LEFT: LEFT.replace("microbatches)]", "microbatches - 1)]")},
        "never does B5: the backwards of the last micro-batches are still to be done",
    ),
    Answer(
        "backward before forward",
        {PAIR: 'words += [f"B{m}", f"F{warm_up + m}"]'},
        "rank 3 does B0 before F0: a backward needs what its own forward has left",
    ),
    Answer(
        "the wrong forward in the pairs",
        {PAIR: 'words += [f"F{m}", f"B{m}"]'},
        "does F0 2 times: every micro-batch has one forward and one backward",
    ),
    Answer("the order as a text", {LEFT: "return ' '.join(words)"}, "should be a list of words such as F0, and is 'F0"),
    Answer("numbers instead of words", {LEFT: "return [0, 1]"}, "has 0 in it: a word is F or B, and the number of a"),
    Answer(
        "the library's own schedule",
        {LEFT: "return [str(op) for op in mp.schedules.one_f_one_b(ranks, microbatches).ranks[rank]]"},
        "the point is to write it yourself",
    ),
    Answer(
        "blocking sends", {SEND: "comms.send_tensor(tensor, dest)"}, "wait in send, and no rank receives", quick=True
    ),
    Answer("waited for at once", {SEND: "comms.isend(tensor, dest).wait()"}, "wait in send, and no rank receives"),
    Answer("request not kept", {SEND: "comms.isend(tensor, dest)"}, "never waited for it: keep the request"),
    Answer("requests not waited for", {WAIT: "        return\n"}, "never waited for it: keep the request"),
    Answer(
        "only the last request waited for",
        {WAIT: "        requests[-1].wait()\n"},
        "never waited for it: keep the request",
    ),
    Answer("nothing kept", {KEEP: ""}, "begins the backward of micro-batch 0 and has nothing kept for it"),
    Answer("activations not freed", {"kept.pop(m)": "kept[m]"}, "still holds what"),
    Answer(
        "the wrong micro-batch's activation",
        {"kept.pop(m)": "kept.pop(max(kept))"},
        "does the backward of micro-batch 1 with the gradient of micro-batch 0",
    ),
    Answer("loss not divided", {SHARE: "loss_function(outputs, answers[m])"}, "were added up and not divided"),
    Answer(
        "each micro-batch counts the same",
        {SHARE: "loss_function(outputs, answers[m]) / microbatches"},
        "every micro-batch counts the same, but they have 3, 2 samples",
    ),
    Answer(
        "the loss of the last micro-batch",
        {"total.add_(outputs.detach())": "total.copy_(outputs.detach() * len(targets) / len(answers[m]))"},
        "that is the loss of the last micro-batch alone",
    ),
    Answer(
        "the loss with its graph", {"total.add_(outputs.detach())": "total.add_(outputs)"}, "still hangs on its graph"
    ),
    Answer(
        "no messages yet",
        {"if not is_first:\n            received = comms": "if False:\n            received = comms"},
        "puts the batch's inputs into its stage: only rank 0 does",
    ),
    Answer("no gradient asked for", {".requires_grad_()": ""}, "requires_grad_() is missing"),
    Answer(
        "begins without a gradient",
        {"None if is_last else comms.recv_tensor(outputs.shape, rank + 1, outputs.dtype)": "None"},
        "starts its backward without a gradient",
    ),
    Answer(
        "sends the activation back",
        {"start_sending(received.grad, rank - 1)": "start_sending(received.detach(), rank - 1)"},
        "row of gradients",
    ),
    Answer(
        "the loss as a text",
        {"return total if is_last else None": "return str(total) if is_last else None"},
        "should be a number, and is 'tensor(",
    ),
]
