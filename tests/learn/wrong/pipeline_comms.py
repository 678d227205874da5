from answers import Answer

ANSWERS = [
    Answer(
        "a ring instead of a line",
        {
            "rank - 1 if rank > 0 else None": "(rank - 1) % world_size",
            "rank + 1 if rank < world_size - 1 else None": "(rank + 1) % world_size",
        },
        "that is a ring: rank 0 of 3 has no rank before it",
        quick=True,
    ),
    Answer("the wrong way round", {"return before, after": "return after, before"}, "is the wrong way round"),
    Answer(
        "off by one at the end",
        {"rank < world_size - 1 else": "rank < world_size else"},
        "neighbours(2, 3) names rank 3, and there is none",
    ),
    Answer(
        "a header as long as the shape",
        {"    return header\n": "    return header[: 2 + tensor.dim()]\n"},
        "a receiver must know the size of a header before it has seen anything",
        quick=True,
    ),
    Answer(
        "number of dimensions left out",
        {"return numbers[2 : 2 + dimensions], dtype": "return numbers[2:], dtype"},
        "must also say how many dimensions there are",
    ),
    Answer(
        "a size of 0 taken for the end",
        {"return numbers[2 : 2 + dimensions], dtype": "return [size for size in numbers[2:] if size], dtype"},
        "a size of 0 is a size",
    ),
    Answer(
        "dtype left out",
        {"DTYPES[numbers[0]], numbers[1]": "torch.float32, numbers[1]"},
        "the dtype must be in the header too",
    ),
    Answer(
        "header of floats",
        {"header = torch.zeros(HEADER, dtype=torch.int64)": "header = torch.zeros(HEADER)"},
        "the header is float32, and the receiver expects int64",
    ),
    Answer(
        "tensor first",
        {
            "    comms.send_tensor(write_header(tensor), dest)\n    comms.send_tensor(tensor, dest)\n": (
                "    comms.send_tensor(tensor, dest)\n    comms.send_tensor(write_header(tensor), dest)\n"
            )
        },
        "header first, then the tensor",
    ),
    Answer(
        "header received as floats",
        {"comms.recv_tensor([HEADER], src, torch.int64)": "comms.recv_tensor([HEADER], src)"},
        "the receiver asks for float32[10] in line",
    ),
    Answer(
        "header not used",
        {"return comms.recv_tensor(shape, src, dtype)": "return comms.recv_tensor(shape, src)"},
        "did not ask for what it says",
    ),
    Answer(
        "no header",
        {"    comms.send_tensor(write_header(tensor), dest)\n": ""},
        "is not the header that the receiver expects",
    ),
    Answer(
        "request not kept",
        {"    comms.send_tensor(tensor, dest)\n": "    comms.isend(tensor, dest)\n"},
        "never waited for it: keep the request",
    ),
    Answer("one neighbour", {"return before, after": "return 5"}, "neighbours(0, 3) should be a pair, and is 5"),
    Answer(
        "three neighbours", {"return before, after": "return before, rank, after"}, "neighbours(0, 3) should be a pair"
    ),
    Answer(
        "neighbours as texts", {"return before, after": "return str(before), str(after)"}, "each of them a rank or None"
    ),
    Answer("no neighbours", {"return before, after": "return None"}, "neighbours(0, 3) should be a pair, and is None"),
    Answer(
        "a header of text",
        {"    return header\n": "    return str(tensor.shape)\n"},
        "a header should be a tensor, and is",
    ),
    Answer(
        "shape as a number",
        {"return numbers[2 : 2 + dimensions], dtype": "return numbers[2], dtype"},
        "the shape that read_header returns should be a list of whole numbers, and is 4",
    ),
    Answer(
        "shape as fractions",
        {"return numbers[2 : 2 + dimensions], dtype": "return [n / 1 for n in numbers[2 : 2 + dimensions]], dtype"},
        "the shape that read_header returns should be a list of whole numbers, and is [4.0]",
    ),
    Answer(
        "dtype as a number",
        {"return numbers[2 : 2 + dimensions], dtype": "return numbers[2 : 2 + dimensions], numbers[0]"},
        "the dtype that read_header returns should be a dtype such as torch.float32, and is 0",
    ),
    Answer(
        "nothing received",
        {"return comms.recv_tensor(shape, src, dtype)": "comms.recv_tensor(shape, src, dtype)"},
        "should be a tensor, and is None",
    ),
    Answer(
        "every header twice",
        {
            "    comms.send_tensor(write_header(tensor), dest)\n": "    comms.send_tensor(write_header(tensor), dest)\n"
            * 2,
            "    header = comms": "    comms.recv_tensor([HEADER], src, torch.int64)\n    header = comms",
        },
        "3 messages were sent for tensor 0, and two are enough",
    ),
    Answer(
        "the header says it all",
        {
            "    comms.send_tensor(tensor, dest)\n": "",
            "return comms.recv_tensor(shape, src, dtype)": (
                "from microparallel.learn.graders.pipeline_comms import _TENSORS\n"
                "    return next(one for one in _TENSORS if (list(one.shape), one.dtype) == (shape, dtype))"
            ),
        },
        "1 message was sent for tensor 0, and it takes two",
    ),
]
