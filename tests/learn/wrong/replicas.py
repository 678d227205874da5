from answers import Answer

COPY = "copy.deepcopy(model).to(device)"
SHARE = (
    "    ranges = torch.arange(len(targets)).tensor_split(len(devices))\n"
    "    return [(inputs[rows].to(device), targets[rows].to(device)) "
    "for rows, device in zip(ranges, devices, strict=True)]\n"
)
KEEP = "        losses.append(loss.detach())\n"
NOT_NONE = "            if parameter.grad is not None:\n                total += parameter.grad.cpu() * seen\n"
GIVE = (
    "        for parameter in same_parameter:\n    "
    + "        parameter.grad = (total / sum(samples)).to(parameter.device)\n"
)

ANSWERS = [
    Answer(
        "moved and not copied",
        {COPY: "model.to(device)"},
        "module.to(device) moves the module itself and copies nothing that is there already",
        quick=True,
    ),
    Answer("copied and not moved", {COPY: "copy.deepcopy(model)"}, "replica 2 is on cpu, and was to be on meta"),
    Answer(
        "other weights",
        {COPY: "nn.Sequential(*(copy.deepcopy(one) for one in reversed(list(model)))).to(device)"},
        "replica 0 has other weights than the model",
    ),
    Answer(
        "chunks",
        {SHARE: SHARE.replace("tensor_split", "chunk").replace("strict=True", "strict=False")},
        "6 samples for 4 devices: 3 parts; every device needs one",
        quick=True,
    ),
    Answer(
        "the rest of the batch lost",
        {
            SHARE: "    size = len(targets) // len(devices)\n    cuts = [slice(n * size, n * size + size) "
            "for n in range(len(devices))]\n    return [(inputs[cut].to(device), targets[cut].to(device)) "
            "for cut, device in zip(cuts, devices)]\n"
        },
        "the parts have 1, 1, 1, 1 samples, 4 in all: some are lost",
    ),
    Answer(
        "the rest to the last one",
        {
            SHARE: "    size, last = len(targets) // len(devices), len(devices) - 1\n"
            "    cuts = [slice(n * size, None if n == last else n * size + size) for n in range(last + 1)]\n"
            "    return [(inputs[cut].to(device), targets[cut].to(device)) for cut, device in zip(cuts, devices)]\n"
        },
        "sizes shall differ by at most one",
    ),
    Answer(
        "parts not moved",
        {SHARE: SHARE.replace(".to(device)", "")},
        "part 2's inputs are on cpu, and its replica is on meta",
    ),
    Answer(
        "targets cut in another way",
        {SHARE: SHARE.replace("targets[rows]", "targets.flip(0)[rows]")},
        "inputs and targets were cut differently",
    ),
    Answer(
        "a number in between",
        {KEEP: "        losses.append(torch.tensor(loss.item()).double())\n"},
        "between two replicas the code asks for a number (item)",
        quick=True,
    ),
    Answer("no backward", {"        loss.backward()\n": ""}, "replica 0 has no gradients: its backward was not done"),
    Answer(
        "every replica counts alike",
        {"parameter.grad.cpu() * seen": "parameter.grad.cpu()", "(total / sum(samples))": "(total / 2)"},
        "one saw more samples than the other: weight each gradient by its samples",
    ),
    Answer(
        "divided by the replicas",
        {"parameter.grad.cpu() * seen": "parameter.grad.cpu()", "(total / sum(samples))": "(total / len(samples))"},
        "also of the one that saw nothing",
    ),
    Answer("not divided", {"(total / sum(samples))": "total.clone()"}, "this is the sum over all samples: divide it"),
    Answer(
        "only those with samples",
        {
            GIVE: GIVE.replace(
                "            parameter.grad =",
                "            if parameter.grad is None:\n                continue\n            parameter.grad =",
            )
        },
        "replica 2, which saw no sample, was given no gradient",
    ),
    Answer(
        "a missing gradient not expected",
        {NOT_NONE: "            total += parameter.grad.cpu() * seen\n"},
        "'NoneType' object has no attribute 'cpu'",
    ),
    Answer("left on the CPU", {".to(parameter.device)": ""}, "rank 0 stopped in line"),
    Answer(
        "one tensor for all",
        {GIVE: "        total /= sum(samples)\n" + GIVE.replace("(total / sum(samples))", "total")},
        "two replicas have one and the same tensor as their gradient",
        quick=True,
    ),
    Answer(
        "parameters instead of gradients",
        {"parameter.grad = (total": "parameter.data = (total"},
        "parameters were changed: average parameter.grad",
    ),
    Answer(
        "torch's DataParallel",
        {COPY: "nn.DataParallel(copy.deepcopy(model)).to(device)"},
        "your code calls torch.nn.parallel.DataParallel: the point is to write it yourself",
    ),
]
