from answers import Answer

SHARE = "return loss_function(outputs, answers[m]) * len(answers[m]) / len(targets)"
TAKE = "received, outputs = kept.pop(m)"
ORDER = """    for m in range(microbatches):
        forward(m)
    for m in range(microbatches):
        backward(m)
"""

TOGETHER = """    def forward(m: int) -> None:
        if m == 0 and not is_first:
            came = comms.recv_tensor((len(inputs), stage.width), rank - 1, inputs.dtype)
            kept["parts"] = [part.clone().requires_grad_() for part in came.tensor_split(microbatches)]
        received = parts[m] if is_first else kept["parts"][m]
        outputs = stage(received)
        if is_last:
            outputs = share_of_loss(outputs, m)
            total.add_(outputs.detach())
        kept[m] = received, outputs
        if m == microbatches - 1 and not is_last:
            comms.send_tensor(torch.cat([kept[one][1].detach() for one in range(microbatches)]), rank + 1)

    def backward("""

ANSWERS = [
    Answer(
        "loss not divided",
        {SHARE: "return loss_function(outputs, answers[m])"},
        "were added up and not divided: the gradients are those of a loss about 4 times too large",
        quick=True,
    ),
    Answer(
        "divided by the micro-batches though they are uneven",
        {SHARE: "return loss_function(outputs, answers[m]) / microbatches"},
        "every micro-batch counts the same, but they have 3, 2, 2 samples",
    ),
    Answer(
        "divided twice",
        {SHARE: SHARE + " / microbatches"},
        "was divided by the 4 micro-batches one time too many",
    ),
    Answer(
        "the last activation with the first gradient",
        {TAKE: "received, outputs = kept.pop(m if is_last else max(kept))"},
        "rank 0 does the backward of micro-batch 3 with the gradient of micro-batch 0",
        quick=True,
    ),
    Answer(
        "only the last activation kept",
        {"        kept[m] = received": "        kept[0] = received", TAKE: "received, outputs = kept[0]"},
        "goes back through the same graph twice",
    ),
    Answer(
        "forward and backward of one micro-batch after the other",
        {ORDER: "    for m in range(microbatches):\n        forward(m)\n        backward(m)\n"},
        "does not work in GPipe's order",
    ),
    Answer("activations not freed", {TAKE: "received, outputs = kept[m]"}, "still holds what 3 micro-batches left"),
    Answer(
        "losses added up with their graphs",
        {
            "total = torch.zeros((), dtype=inputs.dtype)": "total = 0.0",
            "total.add_(outputs.detach())": ("nonlocal total\n            total = total + outputs"),
        },
        "add up losses without their graphs (detach)",
    ),
    Answer(
        "backward of the last micro-batch only",
        {
            ORDER: ORDER.replace(
                "    for m in range(microbatches):\n        backward(m)\n", "    backward(microbatches - 1)\n"
            )
        },
        "does 1 backward, and there are 4 micro-batches: one for each. Micro-batch 0, 1, 2 has none",
    ),
    Answer(
        "gradients cleared for every micro-batch",
        {"        outputs.backward(gradient)\n": "        stage.zero_grad()\n        outputs.backward(gradient)\n"},
        "only micro-batch 3 of 4 is in the gradients",
    ),
    Answer("missing requires_grad", {".requires_grad_()\n": "\n"}, "requires_grad_() is missing"),
    Answer(
        "state not reset between steps",
        {
            "    total = torch.zeros((), dtype=inputs.dtype)\n": (
                "    total = stage.__dict__.setdefault('total', torch.zeros((), dtype=inputs.dtype))\n"
            )
        },
        "the loss of the step before is in it",
    ),
    Answer(
        "loss of the last micro-batch returned",
        {"total.add_(outputs.detach())": "total.copy_(loss_function(stage.layers(received), answers[m]).detach())"},
        "that is the loss of the last micro-batch alone",
    ),
    Answer(
        "the loss as a text",
        {"return total if is_last else None": "return str(total) if is_last else None"},
        "should be a number, and is 'tensor(",
    ),
    Answer(
        "the loss as a list",
        {"return total if is_last else None": "return [total] if is_last else None"},
        "should be a number, and is [",
    ),
    Answer(
        "a loss on every rank",
        {"return total if is_last else None": "return total"},
        "rank 0 returns tensor(0., dtype=torch.float64) as the loss: only the last rank knows it",
    ),
    Answer(
        "all activations in one message",
        {"    def backward(": TOGETHER},
        "in a step, and there are 4 micro-batches: one activation for each",
    ),
]
