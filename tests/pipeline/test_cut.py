"""A model is cut into the best contiguous stages, under its own names, and measuring it leaves no trace."""

import itertools
import time
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from microparallel.errors import PartitionError, UsageError
from microparallel.models import GPT, FullMLP
from microparallel.pipeline.cut import best_partition, cut, shared_parameters
from microparallel.pipeline.layers import NamedLayer, layer_times, layers_of


class Model(nn.Module):
    """Layers in an order and under names of its own; `choose` says which of them it names."""

    def __init__(self, choose):
        super().__init__()
        self.head = nn.Linear(3, 2)
        self.body = nn.ModuleDict({"first": nn.Linear(4, 3), "second": nn.BatchNorm1d(3)})
        self.choose = choose

    def pipeline_layers(self):
        return self.choose(self)


def names(layers):
    return [layer.name for layer in layers]


def message(error, function, *arguments, **options):
    with pytest.raises(error) as caught:
        function(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ── layers_of ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_layers_of_sequences():
    modules = [nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)]
    for model in [nn.Sequential(*modules), nn.ModuleList(modules), modules, tuple(modules)]:
        layers = layers_of(model)
        assert names(layers) == ["0", "1", "2"]
        assert [layer.module for layer in layers] == modules
    named = nn.Sequential(OrderedDict(embed=modules[0], act=modules[1]))
    assert names(layers_of(named)) == ["embed", "act"]


@pytest.mark.parametrize("model", [FullMLP(4, depth=3), GPT(11, 8, 12, 3, 2), GPT(11, 8, 12, 3, 2, tied=True)])
def test_names_are_those_of_the_state_dict(model):
    layers = layers_of(model)
    assert names(layers) == [f"layers.{index}" for index in range(len(model.layers))]
    state = {f"{layer.name}.{name}": value for layer in layers for name, value in layer.module.state_dict().items()}
    assert list(state) == list(model.state_dict())
    assert [name for layer in layers for name, _ in layer.named_parameters()] == list(state)


def test_a_module_says_how_it_is_cut():
    model = Model(lambda self: [*self.body.values(), self.head])
    assert names(layers_of(model)) == ["body.first", "body.second", "head"]
    assert layers_of(model)[2] == NamedLayer("head", model.head)


def test_the_same_module_twice():
    linear = nn.Linear(2, 2)
    sequential = nn.Sequential(linear, nn.ReLU(), linear)
    assert names(layers_of(sequential)) == ["0", "1", "2"]
    assert "2.weight" in sequential.state_dict()
    assert names(layers_of([linear, linear])) == ["0", "1"]
    model = Model(lambda self: [self.body["first"], self.body["second"], self.head, self.body["second"]])
    assert names(layers_of(model)) == ["body.first", "body.second", "head", "body.second"]


class OwnForward(nn.Sequential):
    def forward(self, inputs):
        return super().forward(inputs) + 1


class OwnParameter(nn.Sequential):
    def __init__(self, *modules):
        super().__init__(*modules)
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (nn.Linear(2, 2), "Linear"),
        (OwnForward(nn.Linear(2, 2)), "OwnForward"),
        (nn.ModuleDict({"a": nn.Linear(2, 2)}), "ModuleDict"),
        (torch.zeros(2), "Tensor"),
        (None, "NoneType"),
    ],
)
def test_models_that_do_not_say_how_they_are_cut(model, name):
    assert message(PartitionError, layers_of, model) == (
        f"cannot tell where to cut a {name}: pass an nn.Sequential or a list of layers, "
        "mp.pipeline_layers(model), or give it a method pipeline_layers() that returns its layers in order"
    )


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ([nn.ReLU(), torch.relu], "layer 1 is a builtin_function_or_method, not an nn.Module: wrap it in one"),
        ([], "this list has no layers: a pipeline needs at least 1"),
        (nn.Sequential(), "this Sequential has no layers: a pipeline needs at least 1"),
        (
            Model(lambda self: [self.body["first"], nn.ReLU()]),
            "Model.pipeline_layers() returned a ReLU at 1 that is not one of its submodules: "
            "assign it, as an nn.Module, to an attribute in __init__",
        ),
        (
            Model(lambda self: [self]),
            "Model.pipeline_layers() returned a Model at 0 that is not one of its submodules: "
            "assign it, as an nn.Module, to an attribute in __init__",
        ),
        (
            Model(lambda self: self.body.values()),
            "head.weight of this Model is in none of its 2 layers, so no stage would hold it: "
            "move it into the layer that uses it",
        ),
        (
            OwnParameter(nn.Linear(2, 2)),
            "scale of this OwnParameter is in none of its 1 layers, so no stage would hold it: "
            "move it into the layer that uses it",
        ),
    ],
)
def test_layers_that_do_not_make_up_the_model(model, expected):
    assert message(PartitionError, layers_of, model) == expected


def test_a_buffer_of_no_layer():
    model = Model(lambda self: [*self.body.values(), self.head])
    model.register_buffer("mask", torch.ones(2), persistent=False)
    assert message(PartitionError, layers_of, model).startswith("mask of this Model is in none of its 3 layers")


# ── best_partition ─────────────────────────────────────────────────────────────────────────────────────────────────


def every_partition(layers, stages):
    for ends in itertools.combinations(range(1, layers), stages - 1):
        yield [end - start for start, end in itertools.pairwise([0, *ends, layers])]


def sums(costs, sizes):
    values = iter(costs)
    return [sum(itertools.islice(values, size)) for size in sizes]


def by_brute_force(costs, stages):
    def rank(sizes):
        runs = sums(costs, sizes)
        return max(runs), sum(run**2 for run in runs), [-size for size in sizes]

    return min(every_partition(len(costs), stages), key=rank)


@settings(max_examples=300)
@given(
    data=st.data(),
    # Few different costs, so that equal cuts are common; quarters, so that sums in brute force are exact.
    costs=st.lists(
        st.sampled_from([0, 0, 1, 2, 5]) | st.integers(0, 99) | st.sampled_from([0.25, 1.5]), min_size=1, max_size=9
    ),
)
def test_best_partition_is_that_of_brute_force(data, costs):
    stages = data.draw(st.integers(1, len(costs)))
    assert best_partition(costs, stages) == by_brute_force(costs, stages)


def test_measured_costs():
    assert best_partition([0.1, 0.2, 0.3, 0.1 + 0.2], 2) == [3, 1]
    assert best_partition([1e-300, 1e-300, 2e-300], 2) == [2, 1]


def test_equal_cuts_have_longer_runs_first():
    assert best_partition([1] * 10, 4) == [3, 3, 2, 2]
    assert best_partition([0] * 5, 3) == [3, 1, 1]
    assert best_partition([7, 0, 7, 0], 2) == [2, 2]  # a ReLU stays with the layer before it


@pytest.mark.parametrize("pattern", [[1], [0], [10**6, *[1] * 20], [0.001, 0.0137, 0.0]])
def test_a_thousand_layers_take_no_time(pattern):
    costs = (pattern * 1000)[:1000]
    started = time.process_time()
    sizes = best_partition(costs, 64)
    assert time.process_time() - started < 1
    assert len(sizes) == 64
    assert sum(sizes) == 1000
    assert min(sizes) >= 1


@pytest.mark.parametrize(
    ("costs", "stages", "expected"),
    [
        (
            [1, 1, 1, 1],
            6,
            "6 stages need at least 6 layers, and this model has 4; "
            "use fewer ranks or stages a rank, or a deeper model",
        ),
        ([1], 0, "stages=0: a pipeline has at least 1 stage"),
        ([1, -1], 1, "layer 1 costs -1: a cost is a finite number of at least 0"),
        ([float("nan")], 1, "layer 0 costs nan: a cost is a finite number of at least 0"),
        ([float("inf")], 1, "layer 0 costs inf: a cost is a finite number of at least 0"),
    ],
)
def test_impossible_partitions(costs, stages, expected):
    assert message(UsageError, best_partition, costs, stages) == expected


# ── cut ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def mlp(depth=4):
    return nn.Sequential(*[module for _ in range(depth) for module in (nn.Linear(4, 4), nn.ReLU())])


def test_cut_by_parameters():
    assert [names(stage) for stage in cut(mlp(), 2)] == [["0", "1", "2", "3"], ["4", "5", "6", "7"]]
    assert cut(FullMLP(8, 6), 3)[1][0].name == "layers.2"
    lopsided = nn.Sequential(nn.Linear(90, 1, bias=False), *[nn.Linear(10, 1, bias=False) for _ in range(4)])
    assert [len(stage) for stage in cut(lopsided, 2, "parameters")] == [1, 4]


def test_a_tied_parameter_counts_wherever_it_is():
    linear = nn.Linear(8, 8)
    assert [len(stage) for stage in cut([linear, linear, linear, nn.Linear(8, 8)], 2)] == [2, 2]


def test_without_parameters_every_layer_counts_the_same():
    assert [len(stage) for stage in cut([nn.ReLU() for _ in range(5)], 2)] == [3, 2]


@settings(max_examples=30)
@given(data=st.data(), depth=st.integers(1, 6))
def test_stages_in_a_row_are_the_model(data, depth):
    model, inputs = mlp(depth), torch.randn(3, 4)
    stages = cut(model, data.draw(st.integers(1, 2 * depth)))
    outputs = inputs
    for layer in itertools.chain(*stages):
        outputs = layer.module(outputs)
    assert torch.equal(outputs, model(inputs))
    assert [layer for stage in stages for layer in stage] == layers_of(model)


def test_cut_by_hand():
    assert [len(stage) for stage in cut(mlp(), 3, [1, 5, 2])] == [1, 5, 2]
    assert [len(stage) for stage in cut(mlp(), 2, (4, 4))] == [4, 4]


class Sleep(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, inputs):
        time.sleep(self.seconds)
        return inputs


def test_cut_by_time():
    model = [Sleep(0.02), Sleep(0.001), Sleep(0.001), Sleep(0.001)]
    assert [len(stage) for stage in cut(model, 2, "time", example=torch.zeros(1))] == [1, 3]


@pytest.mark.parametrize(
    ("stages", "balance", "expected"),
    [
        (2, [8], "balance=[8] is for 1 stages, and there are 2: one number each"),
        (2, [4, 5], "balance=[4, 5] adds up to 9 layers, and this model has 8"),
        (3, (4, 0, 4), "balance=[4, 0, 4]: stage 1 has 0 layers, and needs at least 1"),
        (2, [4.0, 4.0], "balance=[4.0, 4.0]: stage 0 has 4.0 layers, and needs at least 1"),
        (
            2,
            "even",
            'balance="even": choose one of "auto", "parameters", "time", or give a number of layers for each stage',
        ),
        (2, "time", 'balance="time" measures the layers on a micro-batch: pass one as example='),
        (
            9,
            "auto",
            "9 stages need at least 9 layers, and this model has 8; "
            "use fewer ranks or stages a rank, or a deeper model",
        ),
    ],
)
def test_impossible_cuts(stages, balance, expected):
    assert message(UsageError, cut, mlp(), stages, balance) == expected


def test_too_many_stages_are_refused_before_measuring():
    with pytest.raises(PartitionError, match="9 stages need"):
        cut([Sleep(100)], 9, "time", example=torch.zeros(1))


# ── layer_times ────────────────────────────────────────────────────────────────────────────────────────────────────


class Counter(nn.Module):
    """Changes one buffer in place, puts another in its place, and fills an empty one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inside", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("empty", None)

    def forward(self, inputs):
        self.inside += 1
        self.replaced = self.replaced + 1
        self.empty = torch.ones(2)
        return inputs


class Both(nn.Module):
    def forward(self, inputs):
        return {"same": inputs, "index": inputs.argmax(-1), "flag": None}


class Unpack(nn.Module):
    def forward(self, inputs):
        assert inputs["same"].requires_grad
        assert not inputs["index"].requires_grad
        return inputs["index"], (inputs["same"] * 2, inputs["same"].detach())


class Index(nn.Module):
    def forward(self, inputs):
        return inputs[0]


def test_measuring_leaves_no_trace():
    layers = layers_of([nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.ReLU(inplace=True), Counter()])
    modules, inputs = nn.ModuleList(layer.module for layer in layers), torch.randn(5, 3)
    modules[0](inputs).sum().backward()
    gradients = [
        (parameter.grad, None if parameter.grad is None else parameter.grad.clone())
        for parameter in modules.parameters()
    ]
    buffers, state = list(modules.buffers()), {name: value.clone() for name, value in modules.state_dict().items()}
    example, random = inputs.clone(), torch.get_rng_state()

    times = layer_times(layers, inputs, repeats=2)

    assert len(times) == 5
    assert all(seconds > 0 for seconds in times)
    for parameter, (gradient, contents) in zip(modules.parameters(), gradients, strict=True):
        assert parameter.grad is gradient
        assert gradient is None or torch.equal(gradient, contents)
    assert all(one is other for one, other in zip(modules.buffers(), buffers, strict=True))
    assert modules[4].empty is None
    assert list(modules.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in modules.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(inputs, example)
    assert not inputs.requires_grad


def test_a_layer_that_works_in_place_leaves_the_example_alone():
    inputs = torch.tensor([-1.0, 1.0])
    layer_times(layers_of([nn.ReLU(inplace=True)]), inputs)
    assert inputs.tolist() == [-1.0, 1.0]


def test_layers_are_measured_on_what_the_one_before_returned():
    assert len(layer_times(layers_of([Both(), Unpack(), Index()]), torch.randn(3, 4))) == 3
    model = GPT(11, 8, 12, 3, 2, tied=True)
    assert len(layer_times(layers_of(model), torch.randint(11, (2, 8)))) == 4
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_backward_pass_counts():
    class SlowBackward(torch.autograd.Function):
        @staticmethod
        def forward(context, inputs):
            return inputs.clone()

        @staticmethod
        def backward(context, gradient):
            time.sleep(0.02)
            return gradient

    class Slow(nn.Module):
        def forward(self, inputs):
            return SlowBackward.apply(inputs)

    with torch.no_grad():
        (seconds,) = layer_times([NamedLayer("0", Slow())], torch.zeros(2), repeats=1)
    assert seconds >= 0.02


def test_an_error_in_a_layer_names_it_and_leaves_no_trace():
    layers = layers_of([nn.BatchNorm1d(3), nn.Linear(4, 4)])
    with pytest.raises(RuntimeError) as caught:
        layer_times(layers, torch.randn(2, 3))
    assert caught.value.__notes__ == ["while layer 1 (Linear) was timed on the example"]
    assert layers[0].module.num_batches_tracked == 0
    assert layers[0].module.weight.grad is None


def test_no_repeats():
    expected = "repeats=0: each layer is measured at least once"
    assert message(UsageError, layer_times, layers_of([nn.ReLU()]), torch.zeros(1), repeats=0) == expected


# ── shared_parameters ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_tied_gpt_shares_its_embedding_between_the_first_and_the_last_stage():
    model = GPT(11, 8, 12, 3, 2, tied=True)
    ((parameter, places),) = shared_parameters(cut(model, 4))
    assert parameter is model.layers[0].token.weight
    assert places == [(0, "layers.0.token.weight"), (3, "layers.3.linear.weight")]
    assert shared_parameters(cut(model, 1)) == []
    assert shared_parameters(cut(GPT(11, 8, 12, 3, 2), 4)) == []


def test_every_place_is_named():
    one, two = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    stages = cut([one, two, one, one, two], 3, [2, 1, 2])
    assert [
        (parameter is one.weight or parameter is one.bias, places) for parameter, places in shared_parameters(stages)
    ] == [
        (True, [(0, "0.weight"), (1, "2.weight"), (2, "3.weight")]),
        (True, [(0, "0.bias"), (1, "2.bias"), (2, "3.bias")]),
        (False, [(0, "1.weight"), (2, "4.weight")]),
    ]


def test_ties_within_one_stage_are_named_only_with_ties_to_another():
    linear = nn.Linear(2, 2, bias=False)
    assert shared_parameters(cut([linear, linear, nn.ReLU()], 2, [2, 1])) == []
    ((_, places),) = shared_parameters(cut([linear, linear, linear], 2, [2, 1]))
    assert places == [(0, "0.weight"), (0, "1.weight"), (1, "2.weight")]
