from answers import Answer

SENDS = "            comms.send_tensor(ball, 1)\n            ball = comms.recv_tensor(ball.shape, 1, ball.dtype) + 1\n"
ANSWERS_BACK = (
    "            ball = comms.recv_tensor(ball.shape, 0, ball.dtype) + 1\n            comms.send_tensor(ball, 0)\n"
)

ANSWERS = [
    Answer(
        "both send first",
        {
            ANSWERS_BACK: (
                "            comms.send_tensor(ball, 0)\n"
                "            ball = comms.recv_tensor(ball.shape, 0, ball.dtype) + 1\n"
            )
        },
        "both ranks wait in send",
        quick=True,
    ),
    Answer(
        "both receive first",
        {
            SENDS: (
                "            ball = comms.recv_tensor(ball.shape, 1, ball.dtype) + 1\n"
                "            comms.send_tensor(ball, 1)\n"
            )
        },
        "both ranks wait in receive, and no rank sends",
    ),
    Answer(
        "only rank 1 adds",
        {"1, ball.dtype) + 1": "1, ball.dtype)"},
        "rank 0 does not add one to what it receives",
    ),
    Answer(
        "only rank 0 adds",
        {"0, ball.dtype) + 1": "0, ball.dtype)"},
        "rank 1 does not add one to what it receives",
    ),
    Answer(
        "the same ball every round",
        {
            "            ball = comms.recv_tensor(ball.shape, 1, ball.dtype) + 1\n": (
                "            back = comms.recv_tensor(ball.shape, 1, ball.dtype) + 1\n"
            ),
            "    return ball\n": "    return back if comms.rank == 0 and rounds else ball\n",
        },
        "every round begins with the same ball again",
        quick=True,
    ),
    Answer("one round too few", {"range(rounds)": "range(rounds - 1)"}, "rank 0 sent 0 messages in 1 round"),
    Answer(
        "not sent back",
        {"            comms.send_tensor(ball, 0)\n": ""},
        "for rank 1 to send, which has finished",
    ),
    Answer(
        "dtype forgotten",
        {"ball.shape, 1, ball.dtype)": "ball.shape, 1)", "ball.shape, 0, ball.dtype)": "ball.shape, 0)"},
        "recv_tensor expects float32 unless it is told",
    ),
    Answer(
        "the caller's tensor changed",
        {
            "            comms.send_tensor(ball, 1)\n": (
                "            comms.send_tensor(ball, 1)\n            ball.add_(1)\n"
            )
        },
        "finds its own tensor changed",
    ),
    Answer(
        "changed while it is sent",
        {
            "            comms.send_tensor(ball, 0)\n": (
                "            request = comms.isend(ball, 0)\n            ball += 1\n            request.wait()\n"
            )
        },
        "was changed before the send was waited for",
    ),
    Answer("rank 1 adds twice", {"0, ball.dtype) + 1": "0, ball.dtype) + 2"}, "adds one one time too many"),
    Answer(
        "rank 1 starts",
        {
            "if comms.rank == 0:": "if comms.rank == 1:",
            "ball, 1)": "ball, 1 - comms.rank)",
            "ball, 0)": "ball, 1 - comms.rank)",
            "shape, 1,": "shape, 1 - comms.rank,",
            "shape, 0,": "shape, 1 - comms.rank,",
        },
        "rank 1 begins by receiving",
    ),
    Answer("a list returned", {"    return ball\n": "    return ball.tolist()\n"}, "should be a tensor, and is ["),
    Answer("a number returned", {"    return ball\n": "    return float(ball.sum())\n"}, "should be a tensor, and is "),
    Answer("nothing returned", {"    return ball\n": ""}, "returned nothing: return the ball"),
    Answer(
        "another shape returned", {"    return ball\n": "    return ball.sum()\n"}, "has shape [], and should have [3]"
    ),
    Answer(
        "a function returned",
        {"    return ball\n": "    return lambda: ball\n"},
        "should be a tensor, and is <function",
    ),
    Answer(
        "words instead of the ball",
        {
            SENDS: (
                "            comms.send_tensor(torch.zeros(0), 1)\n"
                "            comms.recv_tensor(0, 1)\n"
                "            ball = ball + 2\n"
            ),
            ANSWERS_BACK: (
                "            comms.recv_tensor(0, 0)\n"
                "            comms.send_tensor(torch.zeros(0), 0)\n"
                "            ball = (torch.arange(ball.numel()).reshape(ball.shape) * 10.0 + 2 * _ + 1).type_as(ball)\n"
            ),
        },
        "a message of 0 bytes, and the ball has 12",
    ),
]
