"""A stage's backward pass in two halves: what the stage before waits for now, and what only the optimizer needs later.

```
forward               inputs ──→ linear ──→ gelu ──→ linear ──→ outputs
                                   ↑                   ↑
                                weight 0            weight 1

input half            inputs ←── LINEAR ←── GELU ←── LINEAR ←── gradients of the outputs
                                   ·                   ·
                                weight 0            weight 1      (· is where gradients branch off: kept for later)

weight half                      LINEAR              LINEAR
                                   ↓                   ↓
                                weight 0            weight 1      (from what was kept; gelu is not needed again)
```

In torch's graph of the backward pass, a node is *mixed* if an input of the stage can be reached from it (in capitals
above); from the others only weights can. The input half runs the mixed nodes alone, and each of them calculates
only the gradients that lead on to inputs. So nothing is calculated twice if the weight half asks each *branch*, a mixed
node with weights below it, for its other gradients. Branches that lead to a common weight form a group, whose gradients
are summed first, as they would be in one backward pass: below them, each node runs once.

Linear layers have a cheaper way (`DeferringLinear`), which a stage uses where it can.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from microparallel.data_parallel.compute_copies import Source, source_of
from microparallel.data_parallel.precision import given_back
from microparallel.errors import UsageError
from microparallel.torch_private import enclosing_saved_tensors_hooks, has_hooks, hooks_of_saved, what_arrives_at

Gradients = Sequence[torch.Tensor | None]

# Reentrant checkpoints refuse to calculate gradients of inputs alone; compiled backward passes calculate all at once.
_INDIVISIBLE = ("CheckpointFunctionBackward", "CompiledFunctionBackward")


class SplitBackward:
    """The backward pass of one micro-batch through one stage, split into its input half and its weight half.

    ```python
    split = SplitBackward([outputs], [inputs])
    (gradient,) = split.input_half([gradient_of_outputs])  # send it to the stage before
    split.weight_half()                                    # any time later: adds to parameter.grad
    ```

    Where splitting is impossible, or would calculate much twice (checkpointed and compiled modules), or is not wanted
    (`whole=True`), the input half does all, the weight half nothing, and the attribute `whole` is true.

    Between the halves, the caller must not change in place the gradients that the input half was given or returned: the
    weight half starts from them. Both halves must run on the device, and in the stream, of the forward pass.
    """

    def __init__(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *, whole: bool = False) -> None:
        for index, output in enumerate(outputs):
            if not output.requires_grad:
                raise UsageError(f"output {index} of the stage does not require grad: leave it out")
        for index, tensor in enumerate(inputs):
            if not tensor.is_leaf:
                raise UsageError(f"input {index} of the stage is the result of an operation: pass it through detach()")
        self._outputs = list(outputs)
        self._inputs = list(inputs)
        self._branches: list[_Branch] = []
        self._groups: list[_Group] = []
        self.whole = whole
        if not whole:
            mixed, divisible = _mixed_nodes(outputs, inputs)
            self.whole = not divisible
            self._branches = _branches(outputs, mixed) if divisible else []
        self._next = "input_half"

    def input_half(self, gradients: Gradients) -> list[torch.Tensor | None]:
        """Return the gradients of the inputs, given those of the outputs; None where there is none."""
        if self._next == "input_half" and len(gradients) != len(self._outputs):
            raise UsageError(f"{len(gradients)} gradients for {len(self._outputs)} outputs: give one for each")
        self._check_order("input_half", "weight_half")
        outputs, inputs, branches = self._outputs, self._inputs, self._branches
        self._outputs, self._inputs, self._branches = [], [], []  # free all but what the weight half needs
        if self.whole:
            return _backward_at_once(outputs, inputs, gradients)
        with _keeping(branches, gradients):
            found = _gradients_of(inputs, outputs, gradients)
        self._groups = _groups(branch for branch in branches if branch.kept)
        return found

    def weight_half(self) -> None:
        """Add the gradients of the weights to their `grad`, and free the graph."""
        self._check_order("weight_half", "")
        groups = self._groups[::-1]
        self._groups = []
        while groups:
            groups.pop().accumulate()  # in the order of the backward pass; each is freed when it is done

    def _check_order(self, half: str, following: str) -> None:
        """Each half runs once, the input half first."""
        if half != self._next:
            wanted = f"{self._next}() comes next" if self._next else "both halves are done: build one per micro-batch"
            raise UsageError(f"{half}() was called at the wrong time: {wanted}")
        self._next = following


# ── where gradients branch off to weights ───────────────────────────────────────────────────────────────────────────


class _Branch:
    """A place where gradients branch off to weights alone, along `edges`: here, an output that depends on no input."""

    def __init__(self, edges: dict[int, GradientEdge]) -> None:
        self.edges = edges
        self.kept: Gradients = ()  # in the input half: here, the gradients that go along the edges, in their places

    def start_keeping(self, gradients: Gradients) -> RemovableHandle | None:
        """Keep what the weight half needs; here from the outputs' gradients, elsewhere by a hook in the input half."""
        kept = [gradients[place] if place in self.edges else None for place in range(len(gradients))]
        self.kept = kept if any(gradient is not None for gradient in kept) else ()
        return None

    def pass_on(self) -> list[tuple[GradientEdge, torch.Tensor]]:
        """The gradients that go along the edges, each with its edge."""
        pairs = ((edge, self.kept[place]) for place, edge in self.edges.items())
        return [(edge, gradient) for edge, gradient in pairs if gradient is not None]

    def accumulate(self, weights: Sequence[torch.Tensor]) -> None:  # noqa: ARG002
        """Add to the weights' gradients, when no other branch leads to any of these weights."""
        _backward(self.pass_on())


class _FunctionBranch(_Branch):
    """A mixed node written in Python: whenever it runs it calculates all its gradients, so the needed ones are kept."""

    def __init__(self, node: Node, edges: dict[int, GradientEdge]) -> None:
        super().__init__(edges)
        self.node = node

    def start_keeping(self, gradients: Gradients) -> RemovableHandle | None:  # noqa: ARG002
        """Keep what the node calculates for its edges."""

        def keep(calculated: Gradients, arrived: Gradients) -> None:  # noqa: ARG001
            self.kept = [gradient if place in self.edges else None for place, gradient in enumerate(calculated)]

        return self.node.register_hook(keep)


class _NodeBranch(_Branch):
    """A mixed node of torch's own: `kept` is what arrived at it; the gradients for its edges are calculated later."""

    def __init__(self, node: Node, edges: dict[int, GradientEdge]) -> None:
        super().__init__(edges)
        self.node = node

    def start_keeping(self, gradients: Gradients) -> RemovableHandle | None:  # noqa: ARG002
        """Keep what arrives at the node."""

        def keep(arrived: Gradients) -> None:
            self.kept = arrived

        return self.node.register_prehook(keep)

    def accumulate(self, weights: Sequence[torch.Tensor]) -> None:
        """Let torch's engine run the node and the nodes between it and the weights, and no others."""
        arrived = cast("tuple[torch.Tensor, ...]", self.kept)
        starts = [(GradientEdge(self.node, place), gradient) for place, gradient in enumerate(arrived)]
        # Hooks of the node's tensors run a second time; their effect is in `arrived` already, so it is put back.
        handle = self.node.register_prehook(lambda _: arrived)
        try:
            _backward([(edge, gradient) for edge, gradient in starts if gradient is not None], weights)
        finally:
            handle.remove()

    def pass_on(self) -> list[tuple[GradientEdge, torch.Tensor]]:
        """Call the node directly: the engine would also run the other branches of the group."""
        calculated: list[Gradients] = []

        def call() -> None:
            result = cast("Callable[..., Any]", self.node)(*self.kept)
            calculated.append(result if isinstance(result, tuple) else (result,))

        _while_only_needing(self.edges.values(), call)
        pairs = ((edge, calculated[0][place]) for place, edge in self.edges.items())
        return [(edge, _fitted(gradient, edge)) for edge, gradient in pairs if gradient is not None]


class _Group:
    """The branches that lead to some of the same weights."""

    def __init__(self) -> None:
        self.branches: list[_Branch] = []
        self.weights: list[torch.Tensor] = []
        self._absorbed_by: _Group | None = None

    def absorb(self, other: _Group) -> None:
        """Take over another group's branches."""
        self.branches += other.branches
        other._absorbed_by = self

    def final(self) -> _Group:
        """The group that has absorbed this one, or this one."""
        group = self
        while group._absorbed_by is not None:
            group = group._absorbed_by
        return group

    def accumulate(self) -> None:
        """Add to the weights' gradients, to each once, so that a hook on a gradient runs when it is complete."""
        if len(self.branches) == 1:
            self.branches[0].accumulate(self.weights)
        else:
            _backward([pair for branch in self.branches for pair in branch.pass_on()])


def _mixed_nodes(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> tuple[dict[Node, None], bool]:
    """All nodes from which an input can be reached, nearest to the inputs first, and whether the graph may be split."""
    mixed = dict.fromkeys(get_gradient_edge(tensor).node for tensor in inputs if tensor.requires_grad)
    divisible = True
    seen = set(mixed)
    # A node is visited twice: before its children, and (the flag) after them. Graphs are too deep for recursion.
    stack = [(get_gradient_edge(output).node, False) for output in outputs]
    while stack:
        node, children_done = stack.pop()
        if children_done:
            if any(child in mixed for child in _children(node)):
                mixed[node] = None
        elif node not in seen:
            seen.add(node)
            divisible = divisible and _is_divisible(node)
            stack.append((node, True))
            stack.extend((child, False) for child in _children(node))
    return mixed, divisible


def _branches(outputs: Sequence[torch.Tensor], mixed: dict[Node, None]) -> list[_Branch]:
    """Every place where gradients branch off to weights alone, in the order of the backward pass."""
    ends = [get_gradient_edge(output) for output in outputs]
    found = [_Branch({place: end}) for place, end in enumerate(ends) if end.node not in mixed]
    for node in reversed(mixed):
        following = enumerate(node.next_functions)
        edges = {place: GradientEdge(child, number) for place, (child, number) in following if child is not None}
        edges = {place: edge for place, edge in edges.items() if edge.node not in mixed}
        if edges:
            kind = _FunctionBranch if issubclass(type(node), BackwardCFunction) else _NodeBranch
            found.append(kind(node, edges))
    return found


def _groups(branches: Iterable[_Branch]) -> list[_Group]:
    """Put together the branches that lead to a common node; each node is looked at once."""
    owner: dict[Node, _Group] = {}
    groups: dict[_Group, None] = {}
    for branch in branches:
        group = _Group()
        group.branches.append(branch)
        groups[group] = None
        stack = [edge.node for edge in branch.edges.values()]
        while stack:
            node = stack.pop()
            if node not in owner:
                owner[node] = group
                stack.extend(_children(node))
            elif (other := owner[node].final()) is not group.final():
                del groups[group.final()]
                other.absorb(group.final())
    for node, group in owner.items():
        if _is_leaf(node):
            group.final().weights.append(cast("Any", node).variable)
    return [group for group in groups if group.weights]


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _is_leaf(node: Node) -> bool:
    return node.name().endswith("AccumulateGrad")


def _is_divisible(node: Node) -> bool:
    """Whether a graph with this node may be split."""
    name = node.name()
    return not any(word in name for word in _INDIVISIBLE) and not _is_checkpointed(node)


def _is_checkpointed(node: Node) -> bool:
    """Whether the node's saved tensors are calculated again whenever torch's engine starts (checkpoints)."""
    return any(map(_is_of_checkpoint, hooks_of_saved(node)))


def _is_of_checkpoint(hook: Any) -> bool:
    return getattr(hook, "__module__", "") == "torch.utils.checkpoint"


@contextlib.contextmanager
def _keeping(branches: Sequence[_Branch], gradients: Gradients) -> Iterator[None]:
    """Inside, each branch keeps what the weight half needs from it."""
    handles = [branch.start_keeping(gradients) for branch in branches]
    try:
        yield
    finally:
        for handle in handles:
            if handle is not None:
                handle.remove()


def _gradients_of(
    inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], gradients: Gradients
) -> list[torch.Tensor | None]:
    """The gradients of the inputs, calculated without touching any `.grad`."""
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    given = [(output, gradient) for output, gradient in zip(outputs, gradients, strict=True) if gradient is not None]
    if not wanted or not given:
        return [None] * len(inputs)
    ends, starts = zip(*given, strict=True)
    found = iter(torch.autograd.grad(ends, wanted, starts, retain_graph=True, allow_unused=True))
    return [next(found) if tensor.requires_grad else None for tensor in inputs]


def _backward_at_once(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], gradients: Gradients
) -> list[torch.Tensor | None]:
    """Both halves in one pass; afterwards the inputs' `grad` are as they were before."""
    before = [tensor.grad for tensor in inputs]
    for tensor in inputs:
        tensor.grad = None
    try:
        given = zip(outputs, gradients, strict=True)
        _backward([(get_gradient_edge(output), gradient) for output, gradient in given if gradient is not None])
        return [tensor.grad for tensor in inputs]
    finally:
        for tensor, gradient in zip(inputs, before, strict=True):
            tensor.grad = gradient


def _backward(
    starts: Sequence[tuple[GradientEdge, torch.Tensor]], weights: Sequence[torch.Tensor] | None = None
) -> None:
    """Run torch's engine from some edges: to these weights, or to all that it can reach."""
    if starts:
        edges, gradients = zip(*starts, strict=True)
        torch.autograd.backward(edges, gradients, inputs=weights)


def _while_only_needing(edges: Iterable[GradientEdge], call: Callable[[], None]) -> None:
    """Call a function while torch's engine needs gradients for these edges alone.

    A node that is called meanwhile calculates no others. (A torch version that ignored this would calculate too much,
    but nothing wrong.) The engine needs what it is asked for, even if its own graph does not lead there.
    """
    leaf = torch.zeros((), requires_grad=True)
    with torch.enable_grad():
        root = leaf.clone()
    cast("Node", root.grad_fn).register_prehook(lambda _: call())
    torch.autograd.grad([root], [get_gradient_edge(leaf), *edges], allow_unused=True)


def _fitted(gradient: torch.Tensor, edge: GradientEdge) -> torch.Tensor:
    """A gradient as the engine passes it on: summed over broadcast dimensions, and in the tensor's dtype."""
    wanted = what_arrives_at(edge)
    return gradient.sum_to_size(wanted.shape).to(wanted.dtype)


# ── linear layers ───────────────────────────────────────────────────────────────────────────────────────────────────


class DeferredGradients:
    """What the linear layers of one micro-batch need to compute their weights' gradients later."""

    def __init__(self) -> None:
        self._waiting: list[tuple[_Linear, torch.Tensor, torch.Tensor]] = []

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What is kept: the inputs of the calls, and the gradients of their outputs."""
        return [tensor for _, *kept in self._waiting for tensor in kept]

    def keep(self, layer: _Linear, inputs: torch.Tensor, gradient: torch.Tensor) -> None:
        """Keep the inputs of a call, and the gradient of its outputs."""
        self._waiting.append((layer, inputs, gradient))

    def add_up(self) -> None:
        """Compute the weights' gradients now, and add them to `grad`."""
        with torch.no_grad():
            while self._waiting:
                layer, inputs, gradient = self._waiting.pop()
                layer.add_gradients(inputs.reshape(-1, inputs.shape[-1]), gradient.reshape(-1, gradient.shape[-1]))


class DeferringLinear(TorchFunctionMode):
    """A mode in which linear layers defer their weights' gradients: backward passes only their input's gradient on.

    ```
                full backward                    input half                 weight half, later
    gradient ─→ gradient @ weight ─→ …           gradient @ weight ─→ …
            └─→ gradientᵀ @ inputs → weight.grad keep gradient and inputs   weight.grad += gradientᵀ @ inputs
    ```

    `SplitBackward` can split any graph, but it looks at all nodes, and runs torch's engine once for each layer. Most
    weights of a model are in linear layers, where this is cheaper: nothing needs to be found, and one multiplication
    adds to the gradient that is there instead of making another one. The gradients of copies that layers compute with
    (mixed precision) go to the parameters of which they are copies.
    """

    def __init__(self, deferred: DeferredGradients) -> None:
        super().__init__()
        self._deferred = deferred

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Replace `linear`, where it can be deferred; torch calls this instead of every function."""
        if func is functional.linear and not kwargs:
            sources = [source_of(one) for one in args[1:] if one is not None]
            if _can_defer(args[0], args[1], sources):
                layer = _Linear(args[1], args[2] if len(args) > 2 else None, sources, self._deferred)
                return _LinearFunction.apply(args[0], layer)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


def _can_defer(inputs: torch.Tensor, weight: torch.Tensor, sources: Sequence[Source | None]) -> bool:
    """Whether only the optimizer needs these gradients of weights, and the input's gradient is needed anyway."""
    return (
        torch.is_grad_enabled()
        and inputs.requires_grad
        and inputs.dim() > 1
        and all(source is not None and _plain(source.parameter) for source in sources)
        and inputs.dtype == weight.dtype
        and not torch.is_autocast_enabled(inputs.device.type)
        and not torch.compiler.is_compiling()
        and not _in_checkpoint()
    )


def _in_checkpoint() -> bool:
    """Whether a checkpoint stands around this: it computes the same again in backward, where nothing is deferred."""
    return any(map(_is_of_checkpoint, enclosing_saved_tensors_hooks() or ()))


def _plain(parameter: nn.Parameter) -> bool:
    """Whether a parameter is trained and has no hooks, which would expect its gradient during backward."""
    return parameter.requires_grad and not has_hooks(parameter)


class _Linear:
    """The weights of one call, hidden in an object: so torch's graph does not lead to them.

    Args:
        weight: what the call multiplies by.
        bias: what it adds, if anything.
        sources: for the weight, and the bias if there is one, who gets its gradient.
        deferred: keeps what the weight half needs.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        sources: Sequence[Source | None],
        deferred: DeferredGradients,
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.deferred = deferred
        self._sources = [source for source in sources if source is not None]

    def add_gradients(self, inputs: torch.Tensor, gradient: torch.Tensor) -> None:
        weight, *bias = self._sources
        if weight.parameter is self.weight and weight.parameter.grad is not None:
            weight.parameter.grad.addmm_(gradient.t(), inputs)
        else:
            _add_gradient(weight, gradient.t() @ inputs)
        for source in bias:
            _add_gradient(source, gradient.sum(0))


def _add_gradient(source: Source, gradient: torch.Tensor) -> None:
    parameter = source.parameter
    mine = given_back(gradient, parameter.dtype, source.factor)
    parameter.grad = mine if parameter.grad is None else parameter.grad.add_(mine)


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, inputs: torch.Tensor, layer: _Linear) -> torch.Tensor:
        context.save_for_backward(inputs)
        context.layer = layer
        # Not functional.linear: it may return a view, and autograd lets no layer change that in place.
        outputs = inputs.new_empty((*inputs.shape[:-1], len(layer.weight)))
        flat, rows = outputs.view(-1, len(layer.weight)), inputs.reshape(-1, inputs.shape[-1])
        if layer.bias is None:
            torch.mm(rows, layer.weight.t(), out=flat)
        else:
            torch.addmm(layer.bias, rows, layer.weight.t(), out=flat)
        return outputs

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        layer: _Linear = context.layer
        layer.deferred.keep(layer, context.saved_tensors[0], gradient)
        return gradient @ layer.weight, None
