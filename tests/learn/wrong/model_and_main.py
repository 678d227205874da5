from answers import Answer

SHARE = "share = len(inputs[mine]) / len(inputs)"
BACKWARD = "    (loss * share).backward()\n"
OWN = "    mean_loss *= share\n"
REDUCE = "        comms.all_reduce(parameter.grad)\n"
LOSS = "    comms.all_reduce(mean_loss)\n"
STEP = "    optimizer.step()\n"

ANSWERS = [
    Answer("no broadcast", {"comms.broadcast(parameter.data, 0)": "pass"}, "rank 1 still has weights of its own"),
    Answer("own weights kept", {"broadcast(parameter.data, 0)": "broadcast(parameter.data.clone(), 0)"}, "of its own"),
    Answer("from the last rank", {"(parameter.data, 0)": "(parameter.data, comms.world_size - 1)"}, "of the last rank"),
    Answer(
        "averaged at the start",
        {"comms.broadcast(parameter.data, 0)": "comms.all_reduce(parameter.data, op='mean')"},
        "mean of all ranks' weights: all begin with rank 0's",
    ),
    Answer(
        "only weights, not biases",
        {"(parameter.data, 0)": "(parameter.data, 0) if parameter.dim() > 1 else None"},
        "own 0.bias",
    ),
    Answer(
        "ranks given the same data",
        {"return slice(begin, end)": "return slice(0, end - begin)"},
        "all ranks have the same samples",
        True,
    ),
    Answer("the whole batch on every rank", {"return slice(begin, end)": "return slice(0, samples)"}, "same samples"),
    Answer(
        "left over samples dropped",
        {
            "begin = samples * comms.rank // comms.world_size": "begin = samples // comms.world_size * comms.rank",
            "end = samples * (comms.rank + 1) // comms.world_size": "end = begin + samples // comms.world_size",
        },
        "no rank has sample 6",
    ),
    Answer(
        "own samples ignored",
        {"mse_loss(model(inputs[mine]), targets[mine])": "mse_loss(model(inputs), targets)"},
        "samples went through the model",
    ),
    Answer(
        "missing division by world size",
        {BACKWARD: "    loss.backward()\n"},
        "this is the sum of the ranks' means",
        True,
    ),
    Answer("plain mean of uneven parts", {SHARE: "share = 1 / comms.world_size"}, "weight each by its share"),
    Answer("divided twice", {REDUCE: REDUCE.replace(")", ", op='mean')")}, "this was divided twice"),
    Answer(
        "parameters instead of gradients",
        {"all_reduce(parameter.grad)": "all_reduce(parameter.data, op='mean')"},
        "all-reduces the parameter itself",
    ),
    Answer(
        "nothing averaged",
        {REDUCE: "        pass\n", BACKWARD: "    loss.backward()\n"},
        "rank 0 still holds its own gradient: nothing was averaged",
    ),
    Answer(
        "averaged before backward",
        {BACKWARD: "", LOSS: LOSS + BACKWARD},
        "a gradient is None until backward has made it",
    ),
    Answer(
        "stepped before averaging",
        {STEP: "", BACKWARD: BACKWARD + STEP},
        "stepped before it had been averaged",
    ),
    Answer(
        "gradients not reset between steps",
        {"    optimizer.zero_grad()\n": ""},
        "the gradients of the step before are still in there",
    ),
    Answer("own loss", {OWN + LOSS: ""}, "the loss is this rank's own"),
    Answer("loss is a sum", {OWN: ""}, "the loss is the sum of the ranks' losses"),
    Answer(
        "plain mean of losses",
        {OWN: "    mean_loss /= comms.world_size\n"},
        "the loss is the plain mean",
    ),
    Answer(
        "no samples, no number",
        {"loss.detach().clone() if len(inputs[mine]) else torch.zeros_like(loss)": "loss.detach().clone()"},
        "the mean over no samples is NaN",
    ),
    Answer(
        "two losses",
        {"return mean_loss.item()": "return torch.stack([mean_loss, mean_loss])"},
        "should be one number, and is a tensor of shape [2]",
    ),
    Answer(
        "the loss as a text",
        {"return mean_loss.item()": "return str(mean_loss)"},
        "should be a number, and is 'tensor(",
    ),
    Answer("no loss", {"return mean_loss.item()": "return None"}, "should be a number, and is None"),
    Answer(
        "a slice of letters",
        {"return slice(begin, end)": "return slice('a', 'b')"},
        "my_samples should return a slice of whole numbers",
    ),
    Answer(
        "a slice of fractions",
        {"samples * comms.rank // comms.world_size": "samples * comms.rank / comms.world_size"},
        "my_samples should return a slice of whole numbers",
    ),
    Answer(
        "a pair",
        {"return slice(begin, end)": "return begin, end"},
        "my_samples should return a slice, slice(begin, end), and returned (",
    ),
]
