from answers import Answer

ANSWERS = [
    Answer(
        "blocking sends",
        {"request = comms.isend(": "comms.send_tensor(", "        request.wait()\n": ""},
        "both ranks wait in send",
    ),
    Answer("request not kept", {"        request.wait()\n": ""}, "never waited for it: keep the request"),
    Answer(
        "whole tensors",
        {
            "request = comms.isend(slices[send % ranks], after)": "request = comms.isend(tensor, after)",
            "comms.recv_tensor(expected.shape, before, expected.dtype)": (
                "comms.recv_tensor(tensor.shape, before, tensor.dtype).view(-1).tensor_split(ranks)[receive % ranks]"
            ),
        },
        "pass slices on, not whole tensors",
    ),
]
