from answers import Answer

SPLIT = "    mine = torch.arange(len(layers)).tensor_split(ranks)[rank]\n"
RETURN = "    return nn.Sequential(*(layers[number] for number in mine.tolist()))\n"
WEIGHT = " * (len(tokens) / len(inputs))\n"
AHEAD = "    ahead = min(last - rank, microbatches)\n"
ISEND = "        self.wait()\n        self._open = self._comms.isend(tensor, self._rank)\n"
TIED = "    if last > 0 and rank in (0, last):\n"
ADD = "    weight.grad += other.recv(weight.shape)\n"
WAITS = "    before.wait()\n    behind.wait()\n"
KEPT = "        came, outputs = kept.popleft()\n"

ANSWERS = [
    Answer(
        "the library's own pipeline",
        {"    rank, last = comms.rank": "    mp.Pipeline(stage, comms)\n    rank, last = comms.rank"},
        "calls microparallel.pipeline.pipeline.Pipeline: the point is to write it yourself",
    ),
    Answer(
        "the whole model is kept",
        {SPLIT: SPLIT + "    cut.model = model\n"},
        "which is not in its stage: let go of what other ranks compute",
        quick=True,
    ),
    Answer(
        "the first rank has too much",
        {SPLIT: SPLIT.replace("tensor_split(ranks)", "tensor_split([4, 6] if ranks == 3 else ranks)")},
        "rank 0 has 4 layers, and 3 are the most",
    ),
    Answer("a layer is left out", {SPLIT: SPLIT.replace("len(layers)", "len(layers) - 1")}, "layer 7 is left out"),
    Answer(
        "neighbours share a layer",
        {SPLIT: "    mine = torch.arange(max(2 * rank, 0), 2 * rank + 3) if ranks == 3 else torch.arange(2)\n"},
        "each layer is on one rank",
    ),
    Answer("tied weight not summed", {TIED: "    if False:\n"}, "the tied weight has only the head's part"),
    Answer("tied weight averaged", {ADD: ADD + "    weight.grad /= 2\n"}, "were averaged: they add up"),
    Answer(
        "the sum is sent, not the part",
        {"    other.send(weight.grad.clone())\n": "    other.send(weight.grad)\n"},
        "was changed before the send was waited for",
    ),
    Answer("a rank sends to itself", {TIED: "    if rank in (0, last):\n"}, "which is itself"),
    Answer(
        "GPipe",
        {AHEAD: "    ahead = microbatches\n"},
        "of the 6 micro-batches leave in 3 layers. Begin backwards earlier",
    ),
    Answer("naive", {AHEAD: "    ahead = 0\n"}, "as long as one process"),
    Answer(
        "nothing is let go",
        {
            "behind.recv(outputs.shape))": "behind.recv(outputs.shape), retain_graph=True)",
            KEPT: KEPT + "        forward.kept = [*getattr(forward, 'kept', []), outputs]\n",
        },
        "let go of what is done",
    ),
    Answer("sends that wait", {ISEND: "        self._comms.send(tensor, self._rank)\n"}, "deadlock"),
    Answer("losses added up", {WEIGHT: "\n"}, "the losses of the 6 micro-batches were added up and not divided"),
    Answer("every micro-batch alike", {WEIGHT: " / microbatches\n"}, "every micro-batch counts the same"),
    Answer("a message is never waited for", {WAITS: ""}, "never waited for it"),
    Answer("the loss hangs on its graph", {"outputs.detach())\n        else": "outputs)\n        else"}, "detach it"),
    Answer(
        "the head has a copy of the tied weight",
        {
            "from collections import deque\n": "import copy\nfrom collections import deque\n",
            RETURN: RETURN.replace("layers[number]", "copy.deepcopy(layers[number])"),
        },
        "one parameter in two layers, and a copy is no longer tied",
    ),
    Answer(
        "what was received needs no gradient",
        {".requires_grad_()": ""},
        "a gradient is None until backward has made it, and stays None where requires_grad is not set",
    ),
    Answer(
        "every rank returns a loss",
        {"    return sum(losses) if rank == last else None\n": "    return sum(losses, torch.zeros(()).double())\n"},
        "a rank that does not know the loss returns None",
    ),
]
