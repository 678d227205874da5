"""Pipelines that are right in another way than the solution: no grader may refuse them."""

import pytest
from answers import Answer

from microparallel.learn.catalogue import find_exercise

GPIPE_ORDER = """    for m in range(microbatches):
        backward(m)
"""
PAIRS = """    for m in range(microbatches - warm_up):
        words += [f"F{warm_up + m}", f"B{m}"]
    return words + [f"B{m}" for m in range(microbatches - warm_up, microbatches)]
"""

RIGHT = {
    "manual-split": [
        Answer("copied numbers", {"sent.detach()": "torch.tensor(sent.tolist(), dtype=sent.dtype)"}, ""),
        Answer(
            "autograd's own function",
            {"sent.backward(received.grad)": "torch.autograd.backward(sent, received.grad)"},
            "",
        ),
    ],
    "pipeline-comms": [
        Answer(
            "started, then waited for",
            {
                "    comms.send_tensor(write_header(tensor), dest)\n    comms.send_tensor(tensor, dest)\n": (
                    "    requests = [comms.isend(write_header(tensor), dest), comms.isend(tensor, dest)]\n"
                    "    for request in requests:\n        request.wait()\n"
                ),
            },
            "",
        ),
    ],
    "ping-pong": [
        Answer("added in place", {"0, ball.dtype) + 1": "0, ball.dtype).add_(1)"}, ""),
    ],
    "sharded-model": [
        Answer(
            "cut by torch",
            {
                "    start = rank * size + min(rank, left_over)\n": (
                    "    mine = torch.arange(depth).tensor_split(world_size)[rank].tolist()\n"
                    "    return range(mine[0], mine[-1] + 1) if mine else range(0)\n"
                    "    start = rank * size + min(rank, left_over)\n"
                )
            },
            "",
        ),
    ],
    "naive-pipeline": [
        Answer(
            "with headers, as in pipeline-comms",
            {
                "        comms.send_tensor(outputs, rank + 1)": (
                    "        comms.send_tensor(torch.tensor(outputs.shape), rank + 1)\n"
                    "        comms.send_tensor(outputs, rank + 1)"
                ),
                "comms.recv_tensor(shape, rank - 1, dtype)": (
                    "comms.recv_tensor(comms.recv_tensor(2, rank - 1, torch.int64).tolist(), rank - 1, dtype)"
                ),
            },
            "",
        ),
        Answer(
            "started early",
            {"comms.recv_tensor(shape, rank + 1, dtype)": "comms.irecv(shape, rank + 1, dtype).wait()"},
            "",
        ),
        Answer("neighbours by name", {"rank + 1)": "comms.next_rank)", "rank - 1)": "comms.prev_rank)"}, ""),
    ],
    "gpipe": [
        Answer("the loss as a number", {"return total if is_last": "return total.item() if is_last"}, ""),
        Answer(
            "backwards from the last",
            {GPIPE_ORDER: GPIPE_ORDER.replace("range(", "reversed(range(").replace("):", ")):")},
            "",
        ),
        Answer(
            "a sum over samples",
            {
                "loss_function(outputs, answers[m]) * len(answers[m]) / len(targets)": (
                    "loss_function(outputs, answers[m]) / (len(targets) / len(answers[m]))"
                )
            },
            "",
        ),
    ],
    "1f1b": [
        Answer(
            "forwards as long as there are any",
            {
                PAIRS: (
                    "    for m in range(microbatches):\n"
                    "        words += [f'F{warm_up + m}'] * (warm_up + m < microbatches) + [f'B{m}']\n"
                    "    return words\n"
                )
            },
            "",
        ),
        Answer(
            "the gradient in a list, and autograd's own function",
            {
                "        outputs.backward(gradient)\n": "        torch.autograd.backward([outputs], [gradient])\n",
                "start_sending(outputs.detach(), rank + 1)": "start_sending(outputs, rank + 1)",
            },
            "",
        ),
        Answer(
            "sums of squares divided once",
            {"* len(answers[m]) / len(targets)": "/ (len(targets) / len(answers[m]))"},
            "",
        ),
        Answer(
            "requests waited for with the activations",
            {
                "        kept[m] = received, outputs\n": "        kept[m] = received, outputs, requests[-1:]\n",
                "        received, outputs = kept.pop(m)\n": "        received, outputs, sent = kept.pop(m)\n",
                "        outputs.backward(gradient)\n": (
                    "        outputs.backward(gradient)\n"
                    "        for request in sent if not is_last else []:\n            request.wait()\n"
                ),
            },
            "",
        ),
    ],
    "interleaved": [
        Answer(
            "the warm-up counted in another way",
            {
                "    warm_up = (stages_per_rank - 1) * ranks + 2 * (ranks - 1 - rank)\n": (
                    "    warm_up = min(len(forwards), stages_per_rank * ranks + ranks - 2 * rank - 2)\n"
                )
            },
            "",
        ),
    ],
    "zero-bubble": [
        Answer(
            "backward with names",
            {
                "return torch.autograd.grad(outputs, received, gradient, retain_graph=True)[0]": (
                    "outputs.backward(gradient, inputs=[received], retain_graph=True)\n    return received.grad"
                ),
                "torch.autograd.grad(outputs, parameters, gradient), strict=True)": (
                    "[0] * len(parameters), strict=False)"
                ),
                "        parameter.grad = new if parameter.grad is None else parameter.grad + new\n": (
                    "        outputs.backward(gradient, inputs=parameters)\n        break\n"
                ),
            },
            "",
        ),
        Answer(
            "a queue of those that wait",
            {
                "    waiting = rank\n": "    waiting, queue = rank, []\n",
                "        if m >= waiting:\n": "        queue.append(m)\n        if len(queue) > waiting:\n",
                '{m - waiting}")': '{queue.pop(0)}")',
                "for m in range(max(0, microbatches - waiting), microbatches)": "for m in queue",
            },
            "",
        ),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "answer"),
    [
        pytest.param(name, answer, id=f"{name}: {answer.mistake}")
        for name, answers in RIGHT.items()
        for answer in answers
    ],
)
def test_another_right_answer_passes(judge, name, answer):
    verdict = judge(find_exercise(name), answer.of(find_exercise(name)))
    assert verdict.passed, verdict.message
