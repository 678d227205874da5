from answers import Answer

TRY = "        try:\n            yield\n        finally:\n            self.quiet = before\n"
IF = "        if not self.quiet:\n"
START = '            self.requests[parameter] = self.comms.all_reduce(parameter.grad, op="mean", async_op=True)\n'
LEFT = (
    "        for parameter in self.parameters:\n"
    "            if parameter not in self.requests and parameter.grad is not None:\n    "
) + START
WAIT = "        for request in self.requests.values():\n            request.wait()\n"
BLOCK = "hooks.no_sync() if number < len(micro_batches) else contextlib.nullcontext()"
SHARE = " * (len(targets) / samples)"

ANSWERS = [
    Answer(
        "sent after every micro-batch",
        {BLOCK: "contextlib.nullcontext()"},
        "began 18 all-reduces for 6 gradients: every micro-batch's backward sends them",
        quick=True,
    ),
    Answer(
        "no_sync without effect",
        {IF: "        if True:\n"},
        "within no_sync a backward began an all-reduce: on_gradient is to do nothing there",
    ),
    Answer(
        "quiet for ever after an exception",
        {TRY: "        yield\n        self.quiet = before\n"},
        "after an exception within no_sync the hooks stay quiet",
        quick=True,
    ),
    Answer(
        "the outer block forgotten",
        {"self.quiet = before": "self.quiet = False"},
        "after another no_sync inside it had ended: leave it as it was *before* the block",
        quick=True,
    ),
    Answer(
        "the exception swallowed",
        {
            TRY: "        try:\n            yield\n        except Exception:\n            pass\n"
            "        self.quiet = before\n"
        },
        "no_sync swallows an exception of its block",
    ),
    Answer(
        "the first one is sent",
        {"number < len(micro_batches)": "number > 1"},
        "begins all-reduces in micro-batch 0 of 3: what later ones add is then not in the average",
    ),
    Answer(
        "all of them quiet, sent in finish",
        {BLOCK: "hooks.no_sync()"},
        "first all-reduce begins in finish(), after the last backward is over",
    ),
    Answer(
        "all of them quiet, and nothing sent",
        {BLOCK: "hooks.no_sync()", LEFT: ""},
        "rank 0 still holds its own gradient: nothing was averaged",
    ),
    Answer("the loss not weighted", {SHARE: ""}, "each counts by its part of the samples"),
    Answer(
        "every micro-batch counts alike",
        {SHARE: " / len(micro_batches)"},
        "each micro-batch counts 1/3, but one is smaller than the others",
    ),
    Answer("a sum over samples", {SHARE: " * len(targets)"}, "this is the sum over the samples: divide"),
    Answer(
        "the gradients of earlier micro-batches dropped",
        {"            loss.backward()\n": "            model.zero_grad()\n            loss.backward()\n"},
        "these are the gradients of the last micro-batch alone",
    ),
    Answer(
        "an unused layer forgotten",
        {LEFT: ""},
        "spare.weight, spare.bias still have this rank's own gradient. The last micro-batch did not use that layer",
        quick=True,
    ),
    Answer(
        "backward waits",
        {START: START.replace(", async_op=True", ""), WAIT: ""},
        "waits for its all-reduce, and so does backward",
    ),
    Answer("nobody waits", {WAIT: ""}, "were never waited for: accumulate ends with hooks.finish()"),
    Answer(
        "requests kept",
        {"        self.requests.clear()\n": ""},
        "finish() must forget the requests that it has waited for",
    ),
    Answer("a sum over ranks", {'op="mean", ': ""}, "this is the sum over the ranks"),
    Answer(
        "loss of the last one", {"total += loss.item()": "total = loss_fn(model(inputs), targets).item()"}, "the loss"
    ),
]
