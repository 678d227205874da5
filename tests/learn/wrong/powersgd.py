from answers import Answer

SEED = "        generator = torch.Generator().manual_seed(number)\n"
MATRIX = "        matrix = parameter.grad + self.residuals[parameter]\n"
P = "        p = matrix @ self.q[parameter]\n"
REDUCE_P = '        self.comms.all_reduce(p, op="mean")\n'
ORTHONORMAL = "        p = orthonormal(p)\n"
Q = "        q = matrix.T @ p\n"
RESIDUAL = "        self.residuals[parameter] = matrix - p @ q.T\n"
REDUCE_Q = '        self.comms.all_reduce(q, op="mean")\n'
GRAD = "        parameter.grad = p @ q.T\n"
KEEP = "        self.q[parameter] = q\n"
SMALL = '            self.comms.all_reduce(parameter.grad, op="mean")\n            return\n'

ANSWERS = [
    Answer(
        "orthonormal before the all-reduce",
        {REDUCE_P + ORTHONORMAL: ORTHONORMAL + REDUCE_P},
        "P is made orthonormal before it is all-reduced",
        quick=True,
    ),
    Answer(
        "both all-reduces at once",
        {REDUCE_P + ORTHONORMAL + Q: ORTHONORMAL + Q + REDUCE_P},
        "Q is computed with this rank's own P, before the all-reduce",
        quick=True,
    ),
    Answer("P is not orthonormal", {ORTHONORMAL: ""}, "P is never made orthonormal"),
    Answer(
        "Q is orthonormal instead of P",
        {ORTHONORMAL: "", REDUCE_Q: REDUCE_Q + "        q = orthonormal(q)\n"},
        "Q is made orthonormal, and not P",
    ),
    Answer("P is not all-reduced", {REDUCE_P: ""}, "P is not all-reduced: every rank has another P"),
    Answer(
        "no mean",
        {REDUCE_Q: REDUCE_Q.replace(', op="mean"', "")},
        "Q is added up over ranks and not averaged",
        quick=True,
    ),
    Answer("averaged twice", {GRAD: "        q /= self.comms.world_size\n" + GRAD}, "Q is divided twice"),
    Answer("Q is not all-reduced", {REDUCE_Q: ""}, "Q is not all-reduced: P · Qᵀ is the rank's own gradient"),
    Answer("Q is not kept", {KEEP: ""}, "Q is not kept: begin each step with the Q of the step before", quick=True),
    Answer(
        "the rank's own Q is kept",
        {REDUCE_Q: KEEP.replace("= q", "= q.clone()") + REDUCE_Q, GRAD + KEEP: GRAD},
        "each rank keeps its own Q for the next step",
    ),
    Answer(
        "another Q on every rank",
        {SEED: SEED.replace("number", "number + 100 * self.comms.rank")},
        "is not that of rank 0: P is the mean of M · Q over ranks, which means nothing if each has another Q",
        quick=True,
    ),
    Answer(
        "zeros to begin with",
        {
            SEED + "        return torch.randn(parameter.shape[1], self.rank, generator=generator, "
            "dtype=parameter.dtype)\n": "        return parameter.new_zeros(parameter.shape[1], self.rank)\n"
        },
        "has a column of zeros: M · Q would be zero there, too",
    ),
    Answer(
        "a Q for the rows",
        {"parameter.shape[1], self.rank": "parameter.shape[0], self.rank"},
        "has shape [8, 2], and should have [6, 2]",
    ),
    Answer(
        "no feedback",
        {MATRIX: "        matrix = parameter.grad\n"},
        "there is no feedback: what P · Qᵀ leaves out is lost",
        quick=True,
    ),
    Answer(
        "the residual keeps what was sent",
        {RESIDUAL: "        self.residuals[parameter] = matrix\n"},
        "the residual keeps what was sent, too: subtract P · Qᵀ from M",
    ),
    Answer(
        "the residual is made with the old Q",
        {RESIDUAL: RESIDUAL.replace("q.T", "self.q[parameter].T")},
        "the residual is made with the old Q",
    ),
    Answer(
        "the product with the old Q",
        {GRAD: GRAD.replace("q.T", "self.q[parameter].T")},
        "the product is made with the old Q",
    ),
    Answer(
        "Q without the residual",
        {Q: "        q = parameter.grad.T @ p\n"},
        "Q is computed without the residual",
    ),
    Answer("biases are left alone", {SMALL: "            return\n"}, "biases are not averaged"),
    Answer("biases are added", {SMALL: SMALL.replace(', op="mean"', "")}, "biases are added up and not averaged"),
    Answer(
        "the whole matrix",
        {P: '        self.comms.all_reduce(matrix, op="mean")\n' + P},
        "and the matrix has as many: that is what PowerSGD avoids",
    ),
    Answer(
        "P travels twice",
        {REDUCE_P: REDUCE_P + REDUCE_P},
        "numbers for a parameter of shape [8, 6], and [16, 12] are enough: P, then Q",
    ),
    Answer(
        "all gathered",
        {REDUCE_P: "        p = torch.stack(self.comms.all_gather(p)).mean(0)\n"},
        "comms.all_gather is not for this exercise",
    ),
    Answer(
        "one rank's P",
        {"        p = matrix @ self.q[parameter]\n": "        p = matrix @ self.q[parameter].T\n"},
        "stopped in line",
    ),
]
