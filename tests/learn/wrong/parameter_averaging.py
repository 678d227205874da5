from answers import Answer

COUNT = "        self.steps += 1\n        if self.steps % self.every == 0:\n            self.average()\n"
REDUCE = '            self.comms.all_reduce(tensor, op="mean")\n'
ALL = "[*self.parameters(), *self.buffers(), *self.optimizer_state()]"
PARAMETERS = "[parameter.detach() for parameter in self.model.parameters()]"
BUFFERS = "[buffer for buffer in self.model.buffers() if buffer.is_floating_point()]"
SAME = '    return every == 1 and optimizer != "adam"\n'

ANSWERS = [
    Answer("after every step", {COUNT: "        self.average()\n"}, "rank 0 averages after steps 1, 2, 3, 4, 5, 6, 7"),
    Answer(
        "counted too late",
        {COUNT: "        if self.steps % self.every == 0:\n            self.average()\n        self.steps += 1\n"},
        "rank 0 averages after steps 1, 4, 7, and should after steps 3, 6",
        quick=True,
    ),
    Answer("never", {COUNT: "        self.steps += 1\n"}, "of 7 steps rank 0 never averages"),
    Answer("the sum", {', op="mean"': ""}, "0.weight is the sum over the ranks"),
    Answer(
        "a clone is averaged",
        {PARAMETERS: "[parameter.detach().clone() for parameter in self.model.parameters()]"},
        "0.weight is still its own: the average must be written into the tensor itself",
        quick=True,
    ),
    Answer(
        "gradients instead of weights",
        {PARAMETERS: "[parameter.grad for parameter in self.model.parameters()]"},
        "0.weight is still its own",
    ),
    Answer(
        "rank 0's for all",
        {REDUCE: "            tensor *= self.comms.rank == 0\n            self.comms.all_reduce(tensor)\n"},
        "is that of rank 0: what the other ranks have learnt is lost",
    ),
    Answer(
        "the optimizer's state forgotten",
        {ALL: "[*self.parameters(), *self.buffers()]"},
        "0.weight: momentum_buffer is still its own: the optimizer keeps it from step to step",
        quick=True,
    ),
    Answer(
        "Adam's second moment forgotten",
        {"self.optimizer.state[parameter].values()": "list(self.optimizer.state[parameter].values())[:2]"},
        "0.weight: exp_avg_sq is still its own",
    ),
    Answer(
        "the optimizer's state reset",
        {REDUCE: REDUCE + "        self.optimizer.state.clear()\n"},
        "momentum_buffer is gone: average what the optimizer keeps",
    ),
    Answer(
        "BatchNorm's statistics forgotten",
        {ALL: "[*self.parameters(), *self.optimizer_state()]"},
        "1.running_mean is still its own: BatchNorm has seen this rank's samples only",
        quick=True,
    ),
    Answer("whole numbers averaged", {BUFFERS: "list(self.model.buffers())"}, "rank 0 stopped in line"),
    Answer("Adam at every step", {SAME: "    return every == 1\n"}, "same_as_gradients('adam', 1) is True"),
    Answer(
        "momentum not linear",
        {SAME: '    return every == 1 and optimizer in ("sgd", "weight decay")\n'},
        "same_as_gradients('momentum', 1) is False, but after 6 steps the weights are",
        quick=True,
    ),
    Answer(
        "SGD at any distance",
        {SAME: '    return every == 1 and optimizer != "adam" or optimizer == "sgd"\n'},
        "same_as_gradients('sgd', 2) is True",
    ),
    Answer(
        "the library's own",
        {"        self.steps = 0": "        mp.course.ParameterAveraging(model, comms, every)\n        self.steps = 0"},
        "your code calls microparallel.course.shortcuts.ParameterAveraging",
    ),
]
