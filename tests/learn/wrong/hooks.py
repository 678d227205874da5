from answers import Answer

REGISTER = "parameter.register_post_accumulate_grad_hook(self.on_gradient)"
START = 'self.requests.append(self.comms.all_reduce(parameter.grad, op="mean", async_op=True))'
WAIT = "        for request in self.requests:\n            request.wait()\n"

ANSWERS = [
    Answer(
        "closure capturing the last parameter",
        {REGISTER: "parameter.register_post_accumulate_grad_hook(lambda _: self.on_gradient(parameter))"},
        "averages the gradient of 4.bias: a function made in a loop sees the loop's *last* parameter",
        True,
    ),
    Answer(
        "closure capturing the first parameter",
        {
            "for parameter in model.parameters()": "for parameter in reversed(list(model.parameters()))",
            REGISTER: "parameter.register_post_accumulate_grad_hook(lambda _: self.on_gradient(parameter))",
        },
        "wants another parameter's gradient, which is not there yet: a function made in a loop sees",
    ),
    Answer(
        "parameter instead of gradient",
        {"all_reduce(parameter.grad": "all_reduce(parameter.data"},
        "itself: the hook is handed the parameter",
    ),
    Answer("missing division by world size", {', op="mean"': ""}, "divide it by the world size", True),
    Answer(
        "divided twice",
        {START: "parameter.grad /= self.comms.world_size\n        " + START},
        "divided twice by the world size",
    ),
    Answer(
        "not asynchronous", {START: 'self.comms.all_reduce(parameter.grad, op="mean")'}, "Start it with async_op=True"
    ),
    Answer(
        "waits in the hook", {START: START + "\n        self.requests[-1].wait()"}, "nothing overlaps; wait in finish()"
    ),
    Answer("request not kept", {START: START.replace("self.requests.append(", "(")}, "keep every request"),
    Answer(
        "only the last request is waited for",
        {WAIT: "        self.requests[-1].wait()\n"},
        "5 of 6 all-reduces were under way",
    ),
    Answer(
        "requests of the last step",
        {"        self.requests.clear()\n": ""},
        "requests of the step before, which are long over",
    ),
    Answer(
        "hook before accumulation",
        {
            "register_post_accumulate_grad_hook(self.on_gradient)": (
                "register_hook(lambda gradient, parameter=parameter: self.on_gradient(parameter))"
            )
        },
        "register_hook fires before it is accumulated",
    ),
    Answer(
        "handles not kept",
        {"self.handles.append(" + REGISTER + ")": REGISTER},
        "after remove() a backward still began 6 all-reduces",
    ),
    Answer("frozen parameters", {"if parameter.requires_grad:": "if True:"}, "a tensor that doesn't require gradient"),
    Answer(
        "only weights",
        {"if parameter.requires_grad:": "if parameter.dim() > 1:"},
        "nobody averages the gradient of 4.bias, 2.bias, 0.bias",
    ),
    Answer(
        "started in finish",
        {
            START: "self.requests.append(parameter)",
            WAIT: '        self.requests = [self.comms.all_reduce(parameter.grad, op="mean", async_op=True)\n'
            "                         for parameter in self.requests]\n" + WAIT,
        },
        "start each one in its hook",
    ),
    Answer(
        "divided while it travels",
        {START: START.replace(', op="mean"', "") + "\n        parameter.grad /= self.comms.world_size"},
        "was changed before the request was waited for",
    ),
    Answer("no hooks", {"if parameter.requires_grad:": "if False:"}, "no hook began an all-reduce"),
    Answer(
        "gradients gone",
        {
            WAIT: WAIT + "        for parameter in self.parameters:\n            parameter.grad = None\n",
            "        self.comms = comms\n": (
                "        self.comms = comms\n        self.parameters = list(model.parameters())\n"
            ),
        },
        "0.weight has no gradient any more: put the average there",
    ),
]
