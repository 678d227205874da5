from answers import Answer

ANSWERS = [
    Answer(
        "a ring instead of a line",
        {
            "rank - 1 if rank > 0 else None": "(rank - 1) % world_size",
            "rank + 1 if rank < world_size - 1 else None": "(rank + 1) % world_size",
        },
        "that is a ring: rank 0 of 3 has nobody before it",
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
]
