"""torch's private names still do what we use them for, and only `torch_private.py` uses them.

Where a test fails with a new torch, the docstring of the function that it tests says what is broken by it.
"""

import ast
import functools
import mmap
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed._functional_collectives import allow_inflight_collective_as_graph_input_ctx, wait_tensor
from torch.utils.checkpoint import checkpoint

from microparallel import torch_private

SOURCE = Path(torch_private.__file__).parent
CPU = torch.device("cpu")


# ── each name ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_nested_values_are_taken_apart_and_put_together():
    tree = torch_private.pytree
    leaves, form = tree.tree_flatten({"a": (1, [2]), "b": None})
    assert tree.tree_unflatten(leaves, form) == {"a": (1, [2]), "b": None}
    assert tree.tree_leaves((1, {"a": 2})) == [1, 2]
    assert tree.tree_map_only(int, lambda number: number + 1, (1, "a")) == (2, "a")
    assert tree.treespec_loads(tree.treespec_dumps(form)) == form
    assert tree.tree_structure((1, 2)) == tree.tree_structure((3, 4))
    paths, _ = tree.tree_flatten_with_path({"a": (1, 2)})
    assert [tree.keystr(path) for path, _ in paths] == ["['a'][0]", "['a'][1]"]


def test_a_compiled_module_is_found_by_its_plain_names():
    plain = nn.Linear(2, 2)
    assert torch_private.compiled_of(torch.compile(plain, backend="eager")) is plain
    assert torch_private.compiled_of(plain) is plain


def test_backward_calls_back_at_its_end_and_says_that_it_runs():
    told = []

    def hook(gradient):
        told.append(torch_private.number_of_backward())
        torch_private.at_end_of_backward(lambda: told.append("end"))
        return gradient

    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(hook)
    for _ in range(2):
        (weight * 2).sum().backward()
    first, _, second, _ = told
    assert told == [first, "end", second, "end"]
    assert None not in (first, second)
    assert first != second
    assert torch_private.number_of_backward() is None


@pytest.mark.parametrize(
    "backward",
    [
        lambda loss, _: loss.backward(),
        lambda loss, _: torch.autograd.backward(loss),
        lambda loss, leaf: torch.autograd.grad(loss, leaf),
    ],
    ids=["Tensor.backward", "autograd.backward", "autograd.grad"],
)
def test_every_backward_starts_through_the_engine(backward):
    before, calls = torch_private.backward_engine(), []

    def engine(*arguments, **named):
        calls.append(1)
        return before(*arguments, **named)

    leaf = torch.ones(2, requires_grad=True)
    torch_private.replace_backward_engine(engine)
    try:
        backward(leaf.sum(), leaf)
    finally:
        torch_private.replace_backward_engine(before)
    assert calls == [1]
    assert torch_private.backward_engine() is before


def test_a_tensor_counts_its_changes():
    tensor = torch.zeros(4)
    before = torch_private.version_of(tensor)
    tensor[:2].add_(1)
    assert torch_private.version_of(tensor) == before + 1


def test_what_holds_a_tensor_is_counted():
    tensor, parameter = torch.zeros(4), nn.Parameter(torch.ones(4))
    held, together = torch_private.references_to(tensor), torch_private.tensors_in_memory_of(tensor)
    parameter.grad = tensor
    assert torch_private.references_to(tensor) == held + 1
    parameter.grad = None
    view = tensor[:2]
    assert torch_private.references_to(tensor) >= held and torch_private.tensors_in_memory_of(tensor) == together + 1
    del view
    assert torch_private.references_to(tensor) == held and torch_private.tensors_in_memory_of(tensor) == together


def test_several_tensors_are_copied_and_measured_at_once():
    tensors = [torch.randn(3, 4), torch.randn(5), torch.randn(2, 2).t()]
    places = [torch.empty(one.shape, dtype=torch.float64) for one in tensors]
    torch_private.copy_all(places, tensors)
    assert all(torch.equal(place, one.double()) for place, one in zip(places, tensors, strict=True))
    tensors[1][2] = float("nan")
    tensors[2][0, 1] = float("inf")
    largest = torch_private.largest_of_each(tensors)
    assert largest[0] == tensors[0].abs().max() and largest.isfinite().tolist() == [True, False, False]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_address_of_a_stream_is_that_of_torch():
    device = torch.device("cuda", 0)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        assert torch_private.current_stream_address(device) == stream.cuda_stream
    assert torch_private.current_stream_address(device) == torch.cuda.current_stream(device).cuda_stream


def test_hooks_of_a_parameter_are_found():
    plain, watched, accumulated = (nn.Parameter(torch.ones(1)) for _ in range(3))
    hook = lambda _: None  # noqa: E731
    watched.register_hook(hook)
    accumulated.register_post_accumulate_grad_hook(hook)
    assert [torch_private.has_hooks(one) for one in (plain, watched, accumulated)] == [False, True, True]
    assert not torch_private.has_hooks(torch.ones(1))
    assert list(torch_private.hooks_of_gradient(accumulated)) == [hook]
    assert not torch_private.hooks_of_gradient(plain)


def test_an_edge_of_the_graph_knows_what_arrives():
    result = torch.ones(2, 3, dtype=torch.float64, requires_grad=True) * 2
    arrives = torch_private.what_arrives_at(get_gradient_edge(result))
    assert (tuple(arrives.shape), arrives.dtype) == ((2, 3), torch.float64)


def test_a_checkpointed_node_is_told_by_the_hooks_of_what_it_saved():
    inputs = torch.ones(2, requires_grad=True)
    plain, checkpointed = inputs.exp(), checkpoint(torch.exp, inputs, use_reentrant=False)
    assert torch_private.hooks_of_saved(plain.grad_fn) == []
    (hook,) = torch_private.hooks_of_saved(checkpointed.grad_fn)
    assert hook.__module__ == "torch.utils.checkpoint"
    plain.sum().backward()
    assert torch_private.hooks_of_saved(plain.grad_fn) == []  # freed, and no error


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(context, tensor):
        context.save_for_backward(tensor)
        return tensor * tensor

    @staticmethod
    def backward(context, gradient):
        return 2 * context.saved_tensors[0] * gradient


def test_what_a_node_has_saved():
    inputs = torch.ones(2, requires_grad=True)
    (saved,) = torch_private.saved_by(inputs.exp().grad_fn)
    assert saved.tolist() == torch.ones(2).exp().tolist()
    assert [one.data_ptr() for one in torch_private.saved_by(Squared.apply(inputs).grad_fn)] == [inputs.data_ptr()]
    assert len(list(torch_private.saved_by(torch.cat([inputs, inputs]).grad_fn))) == 0
    packed = checkpoint(torch.exp, inputs, use_reentrant=False)  # to look would compute it again
    assert list(torch_private.saved_by(packed.grad_fn)) == []
    plain = inputs.exp()
    plain.sum().backward()
    assert list(torch_private.saved_by(plain.grad_fn)) == []  # freed, and no error


def test_a_storage_moves_under_its_views_and_can_be_mapped():
    tensor = torch.arange(4096)
    view = tensor[1:]
    descriptor, size = torch_private.share_by_descriptor(tensor.untyped_storage())
    view[0] = 7
    assert tensor.is_shared()
    with mmap.mmap(descriptor, size) as mapped:  # the descriptor is torch's
        assert int.from_bytes(mapped[8:16], sys.byteorder) == 7


def test_hooks_of_modules_are_called_from_these_dictionaries():
    layer, told = nn.Linear(1, 1), []
    of_all = torch_private.forward_pre_hooks_of_all_modules()
    of_all[-1] = lambda *_: told.append("before")
    hooks, always_called = torch_private.forward_hooks_of(layer)
    hooks[-1], always_called[-1] = lambda *_: told.append("after"), True
    try:
        layer(torch.ones(1))
        with pytest.raises(RuntimeError):
            layer(torch.ones(2))
    finally:
        del of_all[-1]
    assert told == ["before", "after"] * 2
    del hooks[-1], always_called[-1]
    layer(torch.ones(1))
    assert len(told) == 4


def test_children_and_buffers_of_a_module():
    layer, norm = nn.Linear(1, 1), nn.BatchNorm1d(2, track_running_stats=False)
    assert list(torch_private.children_of(nn.Sequential(layer, layer)).items()) == [("0", layer), ("1", layer)]
    assert torch_private.buffers_of(norm)["running_mean"] is None
    assert "running_mean" in torch_private.buffers_of(nn.BatchNorm1d(2))


def test_a_module_presents_what_another_has_under_its_names():
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(2)
            self.scale = nn.Parameter(torch.ones(1))
            self.register_buffer("hidden", torch.ones(1), persistent=False)

    other, view = Other(), nn.Module()
    torch_private.present(view, other)
    assert view.state_dict().keys() == other.state_dict().keys()
    assert dict(view.named_parameters())["norm.weight"] is other.norm.weight
    view.double()
    assert other.scale.dtype == other.hidden.dtype == other.norm.running_mean.dtype == torch.float64


def test_the_first_optimizer_imports_nothing_that_was_not_loaded():
    program = """
import sys, torch
from microparallel import torch_private
torch_private.load_for_optimizers()
before = set(sys.modules)
torch.optim.SGD([torch.zeros(1, requires_grad=True)])
print(len(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20  # and hundreds without


def test_a_function_is_left_uncompiled():
    def function(_):
        return torch.compiler.is_compiling()

    assert torch.compile(function, backend="eager")(torch.ones(1))
    torch.compiler.reset()
    torch_private.leave_uncompiled(function)
    assert not torch.compile(function, backend="eager")(torch.ones(1))


def test_methods_of_a_class_are_left_uncompiled():
    def wrapped(method):
        return functools.wraps(method)(lambda *arguments: method(*arguments))

    @torch_private.uncompiled
    class Kind:
        def method(self):
            return torch.compiler.is_compiling()

        def maker(self):
            return lambda: torch.compiler.is_compiling()

        @wrapped
        def decorated(self):
            return torch.compiler.is_compiling()

        @property
        def asked(self):
            return torch.compiler.is_compiling()

        @staticmethod
        def static():
            return torch.compiler.is_compiling()

    one = Kind()
    decorated, asked = (function.__get__(one) for function in (one.decorated.__wrapped__, Kind.asked.fget))
    for call in (one.method, one.maker(), decorated, asked, one.static):
        torch.compiler.reset()
        assert not torch.compile(call, backend="eager")()


# ── the profiler ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_profiler_is_told():
    assert not torch_private.is_profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as recorded:
        assert torch_private.is_profiling()
        ends = []
        with torch_private.profiled_call("a call", [torch.ones(3)]):
            torch_private.profile_until("its work", ends.append)
        thread = threading.Thread(target=ends[0])
        thread.start()
        thread.join()
    events = {event.name: event for event in recorded.events()}
    assert events["a call"].input_shapes == [[3]]
    assert events["its work"].time_range.end >= events["a call"].time_range.end


# ── torch.distributed ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def world(tmp_path):
    """A world of one, as another program would make it."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_the_next_group_has_the_name_that_was_given(world):
    with torch_private.next_group_is_called("a name"):
        named = dist.new_group([0], use_local_synchronization=True)
    assert named.group_name == "a name"
    assert dist.new_group([0], use_local_synchronization=True).group_name != "a name"


def test_the_store_of_the_world(world):
    store = torch_private.store_of_the_world()
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_a_group_with_gloo_that_torch_does_not_list(world, tmp_path):
    group = torch_private.gloo_group(CPU, dist.FileStore(str(tmp_path / "other"), 1), 0, [0], timedelta(seconds=5))
    assert torch_private.backend_of(group, CPU).name() == "gloo"
    tensor, gathered = torch.ones(2), torch.zeros(2)
    group.allreduce([tensor]).wait()
    torch_private.call_on(group, "all_gather_single", gathered, tensor).wait()
    assert torch.equal(gathered, tensor)
    assert group not in (world, dist.group.WORLD)


def test_nccl_can_be_told_a_timeout():
    if not dist.is_nccl_available():
        pytest.skip("this torch was built without NCCL")
    options = torch_private.nccl_options([0], timedelta(seconds=7))
    assert options._timeout == timedelta(seconds=7)


def test_works_that_may_enter_graphs():
    waited = []

    class Waiting(dist.Work):
        def wait(self, timeout=None):
            waited.append(self)
            return True

    tensor, works = torch.ones(2), [Waiting(), Waiting()]
    assert not torch_private.works_may_enter_graphs()
    with allow_inflight_collective_as_graph_input_ctx():
        assert torch_private.works_may_enter_graphs()
        torch_private.make_known_in_graphs([tensor], works[0])
        wait_tensor(tensor)
        assert waited == works[:1]
        torch_private.make_known_in_graphs([tensor], works[1])
        torch_private.forget_in_graphs([tensor])
        assert waited == works
        wait_tensor(tensor)
        assert waited == works


def test_options_of_a_backend():
    options = torch_private.backend_options("a name", timedelta(seconds=7), (0, 2), "a group")
    assert (options.backend, options._timeout) == ("a name", timedelta(seconds=7))
    assert (options.global_ranks_in_group, options.group_name) == ([0, 2], "a group")


class Group(torch_private.CalledProcessGroup):
    """Notes under which names of ours torch's calls arrive."""

    def __init__(self):
        super().__init__(0, 1)
        self.calls = []

    def _note(name, answer=None):
        def call(self, *_):
            self.calls.append(name)
            return answer

        return call

    start_coalescing = _note("start_coalescing")
    end_coalescing = _note("end_coalescing")
    backend_of = _note("backend_of", "a backend")
    devices = _note("devices", [CPU])
    getBackendName = _note("getBackendName", "noting")
    setGroupName = _note("setGroupName")
    setGroupDesc = _note("setGroupDesc")
    sequence_number = _note("sequence_number", 3)
    all_gather_single = _note("all_gather_single")
    reduce_scatter_single = _note("reduce_scatter_single")


def test_private_calls_arrive_under_our_names():
    group = Group()
    torch_private.start_coalescing(group, CPU)
    torch_private.end_coalescing(group, CPU)
    assert torch_private.backend_of(group, CPU) == "a backend"
    assert group._device_types == [CPU]
    group._set_group_name("a")
    group._set_group_desc("b")
    assert group._get_backend_name() == "noting"
    group._set_sequence_number_for_group()
    assert group._get_sequence_number_for_group() == 3
    for name in ("_allgather_base", "_reduce_scatter_base"):
        getattr(group, name)()
    assert group.calls == [
        "start_coalescing",
        "end_coalescing",
        "backend_of",
        "devices",
        "setGroupName",
        "setGroupDesc",
        "getBackendName",
        "sequence_number",
        "all_gather_single",
        "reduce_scatter_single",
    ]


@pytest.mark.parametrize("kind", [torch_private.CalledProcessGroup, torch_private.CalledWork])
def test_torch_still_has_the_private_methods_that_we_stand_in_for(kind):
    for name in vars(kind):
        if name.startswith("_") and not name.startswith("__"):
            assert hasattr(kind.__base__, name), f"torch no longer calls {name}"


def test_torch_asks_a_work_who_sent_its_message():
    class Work(torch_private.CalledWork):
        def source_rank(self):
            return 3

    assert Work()._source_rank() == 3
    assert torch_private.CalledWork()._source_rank() == -1


def test_a_module_reads_its_parameters_from_the_dictionary_that_it_is_given():
    class Doubled(dict):
        def __getitem__(self, name):
            return nn.Parameter(super().__getitem__(name) * 2)

    layer = nn.Linear(2, 2)
    plain, weight = torch_private.own_parameters_of(layer), layer.weight.detach().clone()
    torch_private.replace_own_parameters(layer, Doubled(plain))
    assert torch.equal(layer.weight, weight * 2)
    assert torch.equal(next(layer.parameters()), weight)


def test_the_hooks_for_saved_tensors_that_stand_around():
    assert torch_private.enclosing_saved_tensors_hooks() is None
    pack, unpack = (lambda tensor: tensor.clone()), (lambda saved: saved)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert torch_private.enclosing_saved_tensors_hooks() == (pack, unpack)
    assert torch_private.enclosing_saved_tensors_hooks() is None


def test_a_class_of_ours_computes_as_a_plain_tensor():
    class Ours(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, arguments=(), named=None):
            with torch_private.without_own_functions():
                return function(*arguments, **(named or {}))

    assert type(torch.ones(2).as_subclass(Ours) + 1) is torch.Tensor


def test_whether_a_backward_adds_to_gradients():
    weight, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    told = []

    def output():
        result = weight * 2
        result.register_hook(lambda _: told.append([torch_private.backward_adds_to(one) for one in (weight, other)]))
        return result.sum()

    output().backward()
    torch.autograd.grad(output(), weight)
    assert told == [[True, False], [False, False]]


def test_whether_what_is_called_is_compiled():
    told = []

    @torch_private.not_compiled_itself
    def look():
        told.append(torch_private.compiles_what_is_called())

    look()
    torch.compile(look, backend="eager")()
    look()
    assert told == [False, True, False]


def test_every_operation_is_seen():
    seen = []

    class Notes(torch_private.EveryOperation):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    with Notes():
        nn.Linear(2, 2)(torch.ones(1, 2))
        torch.tensor([1.0, 2.0])
    assert seen == ["empty", "empty", "uniform_", "uniform_", "ones", "t", "addmm", "lift_fresh"]


def test_what_an_operation_changes_and_whether_it_takes_a_device():
    aten, one, other = torch.ops.aten, torch.ones(2), torch.ones(2)

    def changed(operation, *arguments, **named):
        return [id(tensor) for tensor in torch_private.changed_by(operation, arguments, named)]

    assert changed(aten.add.Tensor, one, other) == []
    assert changed(aten.add_.Tensor, one, other) == [id(one)]
    assert changed(aten.add.out, one, one, out=other) == [id(other)]
    batch_norm = aten.native_batch_norm.default
    assert changed(batch_norm, one, None, None, one, other, True, 0.1, 1e-5) == [id(one), id(other)]
    inputs, mean = torch.rand(3, 2), torch.zeros(2)
    batch_norm(inputs, None, None, mean, torch.ones(2), True, 0.1, 1e-5)
    assert mean.any()  # it does, and torch does not declare it
    assert torch_private.takes_device(aten.ones.default) and torch_private.takes_device(aten.ones_like.default)
    assert not torch_private.takes_device(aten.add.Tensor)


def test_another_function_draws_truncated_normal_numbers():
    calls = []

    def instead(function):
        def draw(tensor, *arguments, **named):
            calls.append((*arguments, *named.values()))
            return function(tensor, *arguments, **named)

        return draw

    tensor = torch.zeros(3)
    with torch_private.truncated_normal(instead):
        nn.init.trunc_normal_(tensor, mean=0.5)
    assert tensor.any() and calls == [(0.5, 1.0, -2.0, 2.0, None)]
    nn.init.trunc_normal_(tensor)
    assert len(calls) == 1


# ── no other file uses one ──────────────────────────────────────────────────────────────────────────────────────────

# Objects of torch's that our code holds, whatever the variable's name is.
TORCHS = (torch.Tensor, nn.Module, torch.UntypedStorage, torch.optim.Optimizer, dist.ProcessGroup, dist.Work)
# Private names of Python's own.
PYTHONS = {"_current_frames", "_exit", "_fields", "_getframe", "_registry", "_replace", "_run_exitfuncs", "_shutdown"}


def is_private(name):
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def private_names_of_torchs_objects():
    examples = [torch.ones(1), nn.Linear(1, 1)]
    names = {name for kind in (*TORCHS, *map(type, examples)) for name in dir(kind)}
    names |= {name for example in examples for name in vars(example)}
    return {name for name in names if is_private(name)}


def own_names(tree: ast.AST) -> set[str]:
    """The private names that a file's own classes define: their methods, attributes and class variables."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            names.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            names |= {
                target.id
                for line in node.body
                for target in getattr(line, "targets", [getattr(line, "target", None)])
                if isinstance(target, ast.Name)
            }
    return {name for name in names if is_private(name)}


def _is_own(node):
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def dotted(node: ast.AST) -> str:
    """A name, or one after another with dots; empty for everything else."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return before and f"{before}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def torch_modules(tree: ast.AST) -> dict[str, str]:
    """What a file's names for things of torch's stand for: {"dist": "torch.distributed"}."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    found[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Attribute):
            first, _, rest = dotted(node.value).partition(".")
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if first in found and isinstance(target, ast.Name):
                    found[target.id] = f"{found[first]}.{rest}"
    return found


def uses(text: str, ours: set[str], torchs: set[str]) -> Iterator[str]:
    """The private names of torch's that a file uses, each with its line.

    - a dotted name that leads from torch through a private name, in an import, an expression or a string;
    - a private attribute of anything but `self` that none of our classes defines, or that torch's objects have and this
      file's own classes do not define;
    - a private attribute of `self` that torch's objects have and this file's own classes do not define;
    - a method by a private name of `ProcessGroup` or `Work`, in a class derived from something of such a name.
    """
    tree = ast.parse(text)
    modules, defined_here = torch_modules(tree), own_names(tree)
    for node in ast.walk(tree):
        line = f"{getattr(node, 'lineno', 0)}: "
        if isinstance(node, ast.Import):
            yield from (line + alias.name for alias in node.names if _leads_from_torch(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (line + name for name in names if _leads_from_torch(name))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            if _leads_from_torch(node.value):
                yield line + node.value
        elif isinstance(node, ast.Attribute):
            first, _, rest = dotted(node).partition(".")
            if first in modules:
                if _leads_from_torch(f"{modules[first]}.{rest}"):
                    yield line + dotted(node)
            elif _is_torchs(node.attr, _is_own(node.value), ours, torchs, defined_here):
                yield line + ast.unparse(node)
        elif isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if _is_torchs(str(name), _is_own(node.args[0]), ours, torchs, defined_here):
                yield line + ast.unparse(node)
        elif isinstance(node, ast.ClassDef) and any(re.search("Group$|Work$", dotted(base)) for base in node.bases):
            called = {name for kind in (dist.ProcessGroup, dist.Work) for name in dir(kind) if is_private(name)}
            yield from (line + name for name in own_names(node) & called)


def _leads_from_torch(name):
    first, *rest = name.split(".")
    return first == "torch" and any(is_private(part) for part in rest)


def _is_torchs(name, own, ours, torchs, defined_here):
    if not is_private(name) or name in PYTHONS or name in defined_here:
        return False
    return name in torchs or (not own and name not in ours)


def test_only_one_file_uses_private_names_of_torch():
    files = {path: path.read_text() for path in SOURCE.rglob("*.py")}
    ours = set().union(*(own_names(ast.parse(text)) for text in files.values()))
    torchs = private_names_of_torchs_objects()
    found = {
        f"{path.relative_to(SOURCE)}:{use}"
        for path, text in files.items()
        if path.name != "torch_private.py"
        for use in uses(text, ours, torchs)
    }
    assert not found, "private names of torch belong into torch_private.py:\n" + "\n".join(sorted(found))


def test_what_is_not_to_be_compiled_is_not():
    torch.compiler.reset()
    graphs = []

    def backend(graph, _):
        graphs.append([node.name for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    @torch_private.not_compiled
    def alone(values):
        return inside(values).cos()

    @torch_private.not_compiled_itself
    def around(values):
        return inside(values).tan()

    def inside(values):
        return values.sin()

    ones = torch.ones(2)
    assert torch.equal(torch.compile(alone, backend=backend)(ones), ones.sin().cos()) and not graphs
    assert torch.equal(torch.compile(around, backend=backend)(ones), ones.sin().tan()) and graphs == [["sin"]]
    assert alone.__name__ == "alone"


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch._C._current_graph_task_id()",
        "import torch.distributed as dist\ndist.distributed_c10d._get_default_store()",
        "from torch.distributed import distributed_c10d as c10d\nc10d._process_group_name",
        "from torch.utils import _pytree",
        "import torch._dynamo",
        "NEEDED = ('torch._dynamo',)",
        "import torch\nautograd = torch.autograd\nautograd._engine_run_backward",
        "parameter._post_accumulate_grad_hooks",
        "def f(x): return x._version",
        "getattr(x, '_backward_hooks', None)",
        "x.untyped_storage()._share_fd_cpu_()",
        "x._a_name_that_is_nowhere_defined",
        "class A:\n def f(self): return self._modules",
        "class Group(dist.ProcessGroup):\n def _get_backend(self): ...",
        "class Message(StartedWork):\n def _source_rank(self): ...",
    ],
)
def test_a_private_name_is_found(text):
    assert list(uses(text, {"_buffers", "_version"}, private_names_of_torchs_objects()))


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed as dist\ndist.group.WORLD.size()",
        "class A:\n def __init__(self): self._modules = []\n def f(self, other): return other._modules",
        "other._ours",
        "import os\nos._exit(0)",
        "x.__class__",
    ],
)
def test_other_names_are_not(text):
    assert not list(uses(text, {"_ours"}, private_names_of_torchs_objects()))


def test_it_stands_on_torch_and_errors_alone():
    tree = ast.parse(Path(torch_private.__file__).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    assert not {module for module in modules if module.startswith("microparallel")} - {"microparallel.errors"}


def test_frames_are_read_only_to_say_where_a_call_came_from():
    """What a function does never depends on its caller; these files name a line to the user."""
    attributes = {"f_back", "f_code", "f_globals", "f_locals", "f_lineno"}
    reads = {
        path.name
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in attributes | {"stack", "extract_stack", "currentframe"}
        if node.attr in attributes or dotted(node.value) in ("inspect", "traceback")
    }
    assert reads == {"exam.py", "learner.py", "place.py", "ranks.py"}
