"""Answers on fewer bytes that are right in another way than the solution: no grader may refuse them."""

import pytest
from answers import Answer

from microparallel.learn.catalogue import find_exercise

OVERFLOW = """        mine = any(not parameter.grad.isfinite().all() for parameter in self.parameters)
        flag = torch.tensor([float(mine)])
        self.comms.all_reduce(flag, op="max")
        return flag.item() > 0
"""
STEP = """        overflow = self.overflow()
        if not overflow:
            for parameter in self.parameters:
                self.comms.all_reduce(parameter.grad, op="mean")
                parameter.grad /= self.scale
"""
GATHER = "        all_values, all_places = self.comms.all_gather(values), self.comms.all_gather(places)\n"
SUM = """        total = torch.zeros_like(residual)
        for values, places in zip(all_values, all_places, strict=True):
            total.index_add_(0, places, values)
        parameter.grad = (total / self.comms.world_size).view_as(parameter)
"""
CHOSEN = """        places = row.abs().topk(k).indices
        return row[places], places
"""
P = """        self.comms.all_reduce(p, op="mean")
        p = orthonormal(p)
"""
RESIDUAL = "        self.residuals[parameter] = matrix - p @ q.T\n"
Q = """        self.comms.all_reduce(q, op="mean")
        parameter.grad = p @ q.T
"""
GRAM_SCHMIDT = """def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    columns = []
    for column in matrix.T:
        for other in columns:
            column = column - (other @ column) * other
        columns.append(column / column.norm())
    return torch.stack(columns, 1)


def another"""

RIGHT = {
    "loss-scaling": {
        "looks at the mean, which all ranks have: no message is needed": {
            OVERFLOW: "        return any(not p.grad.isfinite().all() for p in self.parameters)\n",
            STEP: "        for parameter in self.parameters:\n"
            '            self.comms.all_reduce(parameter.grad, op="mean")\n'
            "        overflow = self.overflow()\n"
            "        if not overflow:\n"
            "            for parameter in self.parameters:\n"
            "                parameter.grad /= self.scale\n",
        },
        "counts the ranks with an overflow": {
            'op="max")\n        return flag.item() > 0': 'op="sum")\n        return bool(flag.item())'
        },
        "the smallest of the answers to the opposite question": {
            "float(mine)": "float(not mine)",
            'op="max")\n        return flag.item() > 0': 'op="min")\n        return flag.item() == 0',
        },
        "gathers the answers": {
            '        self.comms.all_reduce(flag, op="max")\n        return flag.item() > 0\n': (
                "        return any(one.item() > 0 for one in self.comms.all_gather(flag))\n"
            )
        },
        "one sum finds inf and nan": {
            "any(not parameter.grad.isfinite().all() for parameter in self.parameters)": (
                "not sum(parameter.grad.abs().sum() for parameter in self.parameters).isfinite()"
            )
        },
        "divides before it averages": {
            STEP: STEP.replace('op="mean")\n                parameter.grad /= self.scale\n', 'op="mean")\n').replace(
                "                self.comms", "                parameter.grad /= self.scale\n                self.comms"
            )
        },
        "one all-reduce for all gradients": {
            STEP: "        overflow = self.overflow()\n"
            "        if not overflow:\n"
            "            row = torch.cat([parameter.grad.flatten() for parameter in self.parameters])\n"
            '            self.comms.all_reduce(row, op="mean")\n'
            "            nn.utils.vector_to_parameters(row, [p.grad for p in self.parameters])\n"
            "            for parameter in self.parameters:\n"
            "                parameter.grad /= self.scale\n"
        },
        "all-reduces that are started together": {
            STEP: "        overflow = self.overflow()\n"
            "        if not overflow:\n"
            "            works = [self.comms.all_reduce(p.grad, op='mean', async_op=True) for p in self.parameters]\n"
            "            for parameter, work in zip(self.parameters, works):\n"
            "                work.wait()\n"
            "                parameter.grad *= 1 / self.scale\n"
        },
    },
    "topk-feedback": {
        "sorted": {
            CHOSEN: "        places = row.abs().argsort(descending=True)[:k]\n        return row[places], places\n"
        },
        "shorter integers": {GATHER: GATHER.replace("(places)", "(places.int())")},
        "started, and waited for": {
            GATHER: "        works = [self.comms.all_gather(one, async_op=True) for one in (values, places)]\n"
            "        all_values, all_places = (work.wait() for work in works)\n"
        },
        "places first": {
            GATHER: "        all_places = self.comms.all_gather(places)\n"
            "        all_values = self.comms.all_gather(values)\n"
        },
        "both in one message": {
            GATHER: "        both = self.comms.all_gather(torch.stack([values, places.double()]))\n"
            "        all_values, all_places = [one[0] for one in both], [one[1].long() for one in both]\n"
        },
        "the residual is a new tensor": {
            "            residual += gradient\n": "            residual = residual + gradient\n",
            "        residual[places] -= values\n": (
                "        kept = residual.clone()\n        kept[places] = 0\n        self.residuals[parameter] = kept\n"
            ),
        },
        "dense rows that are added": {
            SUM: "        rows = torch.zeros(len(all_values), residual.numel(), dtype=residual.dtype)\n"
            "        for row, values, places in zip(rows, all_values, all_places):\n"
            "            row[places] = values\n"
            "        total = rows[0].clone()\n"
            "        for row in rows[1:]:\n"
            "            total += row\n"
            "        parameter.grad.copy_((total / len(rows)).view_as(parameter))\n"
        },
        "the gradient counts zero": {
            "        if gradient.isfinite().all():\n            residual += gradient\n": (
                "        residual += gradient if gradient.isfinite().all() else torch.zeros_like(gradient)\n"
            )
        },
    },
    "powersgd": {
        "a sum for P: its columns get length 1 anyway": {P: P.replace(', op="mean"', "")},
        "divided by hand": {
            Q: "        self.comms.all_reduce(q)\n        q /= self.comms.world_size\n"
            "        parameter.grad = p @ q.T\n"
        },
        "Gram-Schmidt": {"def orthonormal": GRAM_SCHMIDT},
        "another seed": {"manual_seed(number)": "manual_seed(1234 + 7 * number)"},
        "the same Q for all of one shape": {"manual_seed(number)": "manual_seed(0)"},
        "the residual is what the mean leaves out: its mean over ranks is the same": {
            RESIDUAL: "",
            Q: Q + "        self.residuals[parameter] = matrix - parameter.grad\n",
        },
        "written into the gradient": {Q: Q.replace("parameter.grad = p @ q.T", "parameter.grad.copy_(p @ q.T)")},
        "started, and the residual is made meanwhile": {
            RESIDUAL + Q: "        own = q.clone()\n"
            '        work = self.comms.all_reduce(q, op="mean", async_op=True)\n'
            "        self.residuals[parameter] = matrix - p @ own.T\n"
            "        work.wait()\n        parameter.grad = p @ q.T\n"
        },
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), [(name, way) for name, ways in RIGHT.items() for way in ways])
def test_passes(judge, name, way):
    exercise = find_exercise(name)
    verdict = judge(exercise, Answer(way, RIGHT[name][way], "").of(exercise))
    assert verdict.passed, verdict.message
