from answers import Answer

CUT = "return sent.detach().requires_grad_()"
BACKWARD = "    loss.backward()\n    sent.backward(received.grad)\n"

ANSWERS = [
    Answer("missing detach", {CUT: "return sent.requires_grad_()"}, "still finds its way back", quick=True),
    Answer("clone instead of detach", {CUT: "return sent.clone().requires_grad_()"}, "so detach() it"),
    Answer("missing requires_grad", {CUT: "return sent.detach()"}, "requires_grad_() is missing", quick=True),
    Answer(
        "nothing handed over", {"    sent.backward(received.grad)\n": ""}, "part 1 has no gradients: nothing was handed"
    ),
    Answer("backward without a gradient", {"sent.backward(received.grad)": "sent.backward()"}, "give it what part 2"),
    Answer(
        "backward with ones", {"sent.backward(received.grad)": "sent.sum().backward()"}, "part 1's backward began with"
    ),
    Answer(
        "the activation instead of its gradient",
        {"sent.backward(received.grad)": "sent.backward(received.detach())"},
        "began with the activation itself",
    ),
    Answer(
        "the wrong order",
        {BACKWARD: "    sent.backward(received.grad)\n    loss.backward()\n"},
        "started before part 2's",
    ),
    Answer(
        "backward through a graph that is gone",
        {BACKWARD: "    loss.backward()\n" + "    sent.backward(received.grad)\n" * 2},
        "a backward went through the same graph twice",
    ),
    Answer(
        "another dtype, of which torch speaks as a scalar type",
        {"    loss.backward()\n": "    torch.bmm(inputs[None], inputs.T[None].float())\n    loss.backward()\n"},
        "with RuntimeError: expected scalar type Double but found Float",
    ),
    Answer(
        "backward twice",
        {BACKWARD: "    loss.backward()\n" + "    sent.backward(received.grad, retain_graph=True)\n" * 2},
        "its backward was done twice",
    ),
    Answer(
        "the forward of part 1 again",
        {"    sent.backward(received.grad)\n": "    loss_function(part2(part1(inputs)), targets).backward()\n"},
        "computed its forward 2 times",
    ),
    Answer(
        "gradients thrown away",
        {BACKWARD: "    part1.zero_grad()\n    part2.zero_grad()\n" + BACKWARD},
        "only the second batch is in the gradients",
    ),
    Answer(
        "divided by the samples",
        {"sent.backward(received.grad)": "sent.backward(received.grad / len(inputs))"},
        "divided by the number of samples",
    ),
    Answer(
        "the loss as a number", {"return loss.detach()": "return loss.item()"}, "the loss should be a tensor, and is"
    ),
    Answer("no loss", {"    return loss.detach()\n": ""}, "the loss should be a tensor, and is None"),
    Answer("numbers cross the cut", {CUT: "return sent.tolist()"}, "what crosses the cut should be a tensor, and is ["),
]
