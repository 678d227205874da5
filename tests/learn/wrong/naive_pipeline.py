from answers import Answer

SEND_BACK = "        comms.send_tensor(received.grad, rank - 1)\n"
BEGIN = "        outputs.backward(comms.recv_tensor(shape, rank + 1, dtype))\n"

ANSWERS = [
    Answer(
        "missing requires_grad",
        {"rank - 1, dtype).requires_grad_()": "rank - 1, dtype)"},
        "requires_grad_() is missing",
        quick=True,
    ),
    Answer(
        "inputs used on every rank",
        {
            "inputs if is_first else comms.recv_tensor(shape, rank - 1, dtype).requires_grad_()": (
                "inputs.requires_grad_()"
            )
        },
        "puts the batch's inputs into its stage: only rank 0 does",
    ),
    Answer(
        "a loss on every rank",
        {"    if is_last:\n        loss =": "    if True:\n        loss ="},
        "computes a loss: only the last rank",
        quick=True,
    ),
    Answer(
        "gradient not sent back",
        {"    if not is_first:\n" + SEND_BACK: ""},
        "for rank 2 to send, which has finished",
    ),
    Answer(
        "the activation sent back",
        {SEND_BACK: "        comms.send_tensor(received, rank - 1)\n"},
        "rank 1's backward began with the activation itself: what rank 2 has to send back",
    ),
    Answer(
        "the forward computed again",
        {BEGIN: BEGIN + "        stage.zero_grad()\n        stage(received).sum().backward()\n"},
        "does 2 forwards, and there is 1 batch",
    ),
    Answer(
        "gradient received and not used",
        {BEGIN: "        comms.recv_tensor(shape, rank + 1, dtype)\n        outputs.sum().backward()\n"},
        "rank 1 began its backward with ones",
    ),
    Answer(
        "backward without a gradient",
        {BEGIN: "        outputs.backward()\n"},
        "starts its backward without a gradient",
    ),
    Answer(
        "dtype forgotten",
        {"comms.recv_tensor(shape, rank - 1, dtype)": "comms.recv_tensor(shape, rank - 1)"},
        "recv_tensor expects float32 unless it is told",
    ),
    Answer(
        "a ring instead of a line",
        {
            "    if not is_last:\n        comms.send_tensor(outputs, rank + 1)": (
                "    comms.send_tensor(outputs, (rank + 1) % comms.world_size)"
            )
        },
        "rank 2 sends to rank 0, which is not its neighbour",
    ),
    Answer(
        "gradients thrown away",
        {"    loss = None\n": "    loss = None\n    stage.zero_grad()\n"},
        "gradients of the step before are gone",
    ),
    Answer(
        "no backward on the last rank",
        {
            "        loss.backward()\n": "",
            "comms.send_tensor(received.grad, rank - 1)": (
                "comms.send_tensor(torch.zeros_like(received) if is_last else received.grad, rank - 1)"
            ),
        },
        "rank 2 does 0 backwards, and there is 1 batch",
    ),
    Answer("no loss returned", {"return None if loss is None else loss.detach()": "return None"}, "returns no loss"),
    Answer(
        "received before anything is sent",
        {
            "    outputs = stage(received)\n    if not is_last:\n        comms.send_tensor(outputs, rank + 1)\n": (
                "    outputs = stage(received)\n"
                "    gradient = None if is_last else comms.recv_tensor(shape, rank + 1, dtype)\n"
                "    if not is_last:\n        comms.send_tensor(outputs, rank + 1)\n"
            ),
            BEGIN: "        outputs.backward(gradient)\n",
        },
        "all ranks wait in receive, and no rank sends",
    ),
    Answer("the loss as a text", {"loss.detach()": "str(loss)"}, "should be a number, and is 'tensor("),
    Answer(
        "a pair returned",
        {"return None if loss is None else loss.detach()": "return (0, loss) if loss is None else loss.detach()"},
        "returns (0, None) as the loss: only the last rank knows it",
    ),
    Answer(
        "a mailbox instead of messages",
        {
            "    rank = comms.rank\n": (
                "    import os, pathlib, tempfile, time\n\n"
                "    rank = comms.rank\n"
                "    box = pathlib.Path(tempfile.gettempdir()) / f'mailbox{os.getppid()}'\n"
                "    box.mkdir(exist_ok=True)\n\n"
                "    def put(tensor, to):\n"
                "        torch.save(tensor.detach(), box / f'part{rank}-{to}')\n"
                "        (box / f'part{rank}-{to}').rename(box / f'{rank}-{to}')\n\n"
                "    def take(source):\n"
                "        while not (box / f'{source}-{rank}').exists():\n"
                "            time.sleep(0.001)\n"
                "        found = torch.load(box / f'{source}-{rank}')\n"
                "        (box / f'{source}-{rank}').unlink()\n"
                "        return found\n\n"
            ),
            "comms.recv_tensor(shape, rank - 1, dtype)": "take(rank - 1)",
            "comms.recv_tensor(shape, rank + 1, dtype)": "take(rank + 1)",
            "comms.send_tensor(": "put(",
        },
        "0 messages from rank",
    ),
]
