from answers import Answer

REGISTER = "parameter.register_post_accumulate_grad_hook(self.on_gradient)"
ORDER = "[parameter for parameter in reversed(list(model.parameters())) if parameter.requires_grad]"
NEXT = "        while len(self.requests) < len(self.order) and self.order[len(self.requests)] in self.ready:\n"
START = 'self.requests.append(self.comms.all_reduce(gradient, op="mean", async_op=True))'
MISSING = """        for parameter in self.order:
            if parameter not in self.ready:
                parameter.grad = torch.zeros_like(parameter)
                self.ready.add(parameter)
        self.start_next()
"""
WAIT = "        for request in self.requests:\n            request.wait()\n"
HOOK = 'is complete."""\n        self.ready.add(parameter)\n'
READY = HOOK + "        self.start_next()\n"
AT_ONCE = HOOK + '        self.requests.append(self.comms.all_reduce(parameter.grad, op="mean", async_op=True))\n'

ANSWERS = [
    Answer(
        "closure capturing the last parameter",
        {REGISTER: "parameter.register_post_accumulate_grad_hook(lambda _: self.on_gradient(parameter))"},
        "is handed 0.weight: a function made in a loop sees the loop's *last* parameter",
        True,
    ),
    Answer(
        "each leaves when it is ready",
        {READY: AT_ONCE, MISSING: ""},
        "Begin them in an order that all ranks share",
        True,
    ),
    Answer(
        "each leaves when it is ready, the missing ones at last",
        {
            READY: AT_ONCE,
            MISSING: """        for parameter in self.order:
            if parameter not in self.ready:
                parameter.grad = torch.zeros_like(parameter)
                self.requests.append(self.comms.all_reduce(parameter.grad, op="mean", async_op=True))
""",
        },
        "Begin them in an order that all ranks share",
    ),
    Answer("a skipped layer forgotten", {MISSING: ""}, "this hangs: rank 0 waits"),
    Answer(
        "what is missing is left out",
        {
            MISSING: """        for parameter in self.order[len(self.requests):]:
            if parameter in self.ready:
                self.requests.append(self.comms.all_reduce(parameter.grad, op="mean", async_op=True))
""",
        },
        "for an all-reduce that rank 1 never begins",
    ),
    Answer(
        "no gradient to begin with",
        {"                parameter.grad = torch.zeros_like(parameter)\n": ""},
        "finish() all-reduces None: a parameter that was skipped on this rank has no gradient",
    ),
    Answer(
        "the mean of those that have one",
        {
            WAIT: WAIT + "        for parameter in self.spare:\n            parameter.grad *= 2\n",
            "        self.comms = comms\n": "        self.comms = comms\n"
            "        self.spare = [one for name, one in model.named_parameters() if 'spare' in name]\n",
            "self.requests.clear()": "self.requests.clear(); self.spare = []",
        },
        "also over those that skipped a layer: their gradient counts as zero",
    ),
    Answer(
        "the order of the model",
        {ORDER: "[parameter for parameter in model.parameters() if parameter.requires_grad]"},
        "none of the 6 all-reduces begins before the last gradient has come",
    ),
    Answer("parameter instead of gradient", {"].grad\n": "].data\n"}, "itself: the hook is handed the parameter"),
    Answer("missing division by world size", {', op="mean"': ""}, "divide it by the world size"),
    Answer(
        "divided twice",
        {START: "gradient /= self.comms.world_size\n            " + START},
        "divided twice by the world size",
    ),
    Answer("not asynchronous", {START: START.replace(", async_op=True", "")}, "Start it with async_op=True"),
    Answer(
        "waits in the hook",
        {START: START + "\n            self.requests[-1].wait()"},
        "nothing overlaps; wait in finish()",
    ),
    Answer(
        "request not kept",
        {START: START.replace("self.requests.append(", "(") + "\n            self.requests.append(None)", WAIT: ""},
        "keep every request",
    ),
    Answer(
        "only the last request is waited for",
        {WAIT: "        self.requests[-1].wait()\n"},
        "5 of 6 all-reduces were under way",
    ),
    Answer(
        "requests of the last step",
        {
            "        self.requests.clear()\n": "        self.old = [*getattr(self, 'old', []), *self.requests]\n"
            "        self.requests = []\n",
            WAIT: WAIT.replace("self.requests:", "[*getattr(self, 'old', []), *self.requests]:"),
        },
        "requests of the step before, which are long over",
    ),
    Answer(
        "ready parameters not forgotten",
        {"        self.ready.clear()\n": ""},
        "let nothing of the step before count as ready",
    ),
    Answer(
        "hook before accumulation",
        {
            REGISTER: "parameter.register_hook(lambda gradient, parameter=parameter: self.on_gradient(parameter))",
        },
        "register_hook fires before it is accumulated",
    ),
    Answer("hooks not removed", {"            handle.remove()\n": "            pass\n"}, "remove each of them"),
    Answer("frozen parameters", {" if parameter.requires_grad]": "]"}, "a tensor that doesn't require gradient"),
    Answer(
        "only weights",
        {"if parameter.requires_grad]": "if parameter.dim() > 1]"},
        "no hook averages the gradient of 4.bias, 2.bias, 0.bias",
    ),
    Answer(
        "started in finish",
        {READY: HOOK},
        "start each one in its hook",
    ),
    Answer(
        "divided while it travels",
        {START: START.replace(', op="mean"', "") + "\n            gradient /= self.comms.world_size"},
        "was changed before the request was waited for",
    ),
    Answer(
        "gradients gone",
        {WAIT: WAIT + "        for parameter in self.order:\n            parameter.grad = None\n"},
        "has no gradient any more: put the average there",
    ),
]
