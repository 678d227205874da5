from answers import Answer

RUN = """    size, left_over = divmod(depth, world_size)
    start = rank * size + min(rank, left_over)
    stop = start + size + (1 if rank < left_over else 0)
    return range(start, stop)
"""
BUILD = """        for number in range(depth):
            layer = Layer(width)  # every rank draws for every layer, but holds on to its own
            if number in mine:
                self.layers[str(number)] = layer
"""

ANSWERS = [
    Answer(
        "layers left over are lost",
        {RUN: "    size = depth // world_size\n    return range(rank * size, (rank + 1) * size)\n"},
        "layer 4 is on no rank. What happens to those that are left over?",
        quick=True,
    ),
    Answer(
        "the last rank takes all that is left over",
        {
            RUN: (
                "    size = depth // world_size\n"
                "    return range(rank * size, depth if rank == world_size - 1 else (rank + 1) * size)\n"
            )
        },
        "rank 3 has 4 layers and rank 0 has 1: give the layers that are left over to different ranks",
    ),
    Answer(
        "rounded up, and the last rank has less",
        {RUN: "    size = -(-depth // world_size)\n    return range(rank * size, min(depth, (rank + 1) * size))\n"},
        "rank 0 has 3 layers and rank 2 has 1: give the layers that are left over to different ranks",
    ),
    Answer(
        "the last ranks take one more",
        {RUN: "    return range(depth * rank // world_size, depth * (rank + 1) // world_size)\n"},
        "the first ranks take the layers that are left over",
    ),
    Answer(
        "the later ranks do not begin later",
        {"rank * size + min(rank, left_over)": "rank * size"},
        "layer 1 is on rank 0, 1. Behind ranks with one layer more, each rank begins later",
    ),
    Answer(
        "one after another in turn",
        {RUN: "    return range(rank, depth, world_size)\n"},
        "which is not one run",
    ),
    Answer(
        "random numbers for its own layers only",
        {BUILD: "        for number in mine:\n            self.layers[str(number)] = Layer(width)\n"},
        "the rank drew random numbers for its own layers only",
        quick=True,
    ),
    Answer(
        "names counted from 0",
        {"self.layers[str(number)] = layer": "self.layers[str(number - mine.start)] = layer"},
        "counts its layers from 0 and calls its first one layers.0.weight",
    ),
    Answer(
        "a seed of its own on every rank",
        {BUILD: "        torch.manual_seed(rank)\n" + BUILD.replace("range(depth)", "mine")},
        "the shards are not parts of one model",
    ),
    Answer(
        "all layers kept", {"if number in mine:": "if number < depth:"}, "keeps all 4 layers: only 0, 1 are its own"
    ),
    Answer(
        "the whole model made first",
        {
            BUILD: (
                "        whole = WholeModel(width, depth)\n"
                "        for number in mine:\n"
                "            self.layers[str(number)] = whole.layers[number]\n"
            )
        },
        "does not fit while the model is made either",
    ),
    Answer("the layers back to front", {BUILD: BUILD.replace("range(depth)", "reversed(range(depth))")}, "wrong order"),
    Answer(
        "at least one layer for everybody",
        {"return range(start, stop)": "return range(start, max(stop, start + 1))"},
        "rank 2 has layers 2, and they end with 1",
    ),
    Answer(
        "a pair instead of a range",
        {"return range(start, stop)": "return start, stop"},
        "should be a range, and is (0, 2)",
    ),
    Answer("no layers", {"    return range(start, stop)\n": ""}, "should be a range, and is None"),
]
