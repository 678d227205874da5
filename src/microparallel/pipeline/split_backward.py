"""Linear layers whose weights' gradients are put off: backward passes only their input's gradient on.

```
            full backward                    input half                 weight half, later
gradient ─→ gradient @ weight ─→ …           gradient @ weight ─→ …
        └─→ gradientᵀ @ inputs → weight.grad keep gradient and inputs   weight.grad += gradientᵀ @ inputs
```

Any graph can be split (`split_backward.py`), for the price of looking at all of its nodes, and of a run of torch's
engine for each layer. For linear layers, which is where nearly all of a model's weights are, this is cheaper: nothing
needs to be found afterwards, and one multiplication adds to the gradient that is there instead of making another one.
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

from microparallel.errors import UsageError
from microparallel.torch_private import has_hooks, hooks_of_saved, what_arrives_at


class PutOff:
    """What the linear layers of one micro-batch's forward still have to do for their weights."""

    def __init__(self) -> None:
        self._waiting: list[tuple[_Linear, torch.Tensor, torch.Tensor]] = []

    def keep(self, layer: _Linear, inputs: torch.Tensor, gradient: torch.Tensor) -> None:
        """Remember what a layer's weights need."""
        self._waiting.append((layer, inputs, gradient))

    def add_up(self) -> None:
        """Do it now."""
        with torch.no_grad():
            while self._waiting:
                layer, inputs, gradient = self._waiting.pop()
                layer.add_gradients(inputs.reshape(-1, inputs.shape[-1]), gradient.reshape(-1, gradient.shape[-1]))


class PuttingOff(TorchFunctionMode):
    """Within this mode, linear layers put their weights' gradients off where that is possible."""

    def __init__(self, put_off: PutOff) -> None:
        super().__init__()
        self._put_off = put_off

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """torch calls this instead of every function."""
        if func is functional.linear and not kwargs and _possible(*args):
            inputs, layer = args[0], _Linear(args[1], args[2] if len(args) > 2 else None, self._put_off)
            return _LinearFunction.apply(inputs, layer)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


def _possible(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Whether nobody but the optimizer will look at these gradients, and the input's is wanted anyway."""
    return (
        torch.is_grad_enabled()
        and inputs.requires_grad
        and inputs.dim() > 1
        and _plain(weight)
        and (bias is None or _plain(bias))
        and inputs.dtype == weight.dtype
        and not torch.is_autocast_enabled(inputs.device.type)
        and not torch.compiler.is_compiling()
    )


def _plain(parameter: torch.Tensor) -> bool:
    """Whether a tensor is a parameter that is trained, without hooks that wait for its gradient."""
    return isinstance(parameter, nn.Parameter) and parameter.requires_grad and not has_hooks(parameter)


class _Linear:
    """The parameters of one call; torch does not see them, so its graph does not lead to them."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, put_off: PutOff) -> None:
        self.weight = weight
        self.bias = bias
        self.put_off = put_off

    def add_gradients(self, inputs: torch.Tensor, gradient: torch.Tensor) -> None:
        if self.weight.grad is None:
            self.weight.grad = gradient.t() @ inputs
        else:
            self.weight.grad.addmm_(gradient.t(), inputs)
        if self.bias is not None:
            total = gradient.sum(0)
            self.bias.grad = total if self.bias.grad is None else self.bias.grad.add_(total)


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, inputs: torch.Tensor, layer: _Linear) -> torch.Tensor:
        context.save_for_backward(inputs)
        context.layer = layer
        # Not functional.linear: what it returns may be a view, and then nobody could work on it in place.
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
        layer.put_off.keep(layer, context.saved_tensors[0], gradient)
        return gradient @ layer.weight, None


# A stage's backward pass in two halves: what the stage before waits for now, and what only the optimizer needs later.
#
# ```
# forward               inputs ──→ linear ──→ gelu ──→ linear ──→ outputs
# ↑                   ↑
# weight 0            weight 1
#
# input half            inputs ←── LINEAR ←── GELU ←── LINEAR ←── gradients of the outputs
# ·                   ·
# weight 0            weight 1      (· is where gradients turn off: kept for later)
#
# weight half                      LINEAR              LINEAR
# ↓                   ↓
# weight 0            weight 1      (from what was kept; gelu is not needed again)
# ```
#
# In torch's graph of the backward pass, a node is *mixed* if an input of the stage can be reached from it (in capitals
# above); from the others only weights can. The input half runs the mixed nodes alone, and each of them calculates
# only the gradients that lead on to inputs. So nothing is calculated twice if the weight half asks each *turn-off*, a
# mixed node with weights below it, for its other gradients. Turn-offs that lead to a common weight form a group, whose
# gradients are summed first, as they would be in one backward pass: below them, each node runs once.


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
    (`whole=True`), the first half does it all, the second nothing, and the attribute `whole` is true.

    The first half must not be followed by changes, in place, to the gradients it was given or has returned: they are
    what the second half starts from. Both halves belong on the device, and in the stream, of the forward pass.
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
        self._turn_offs: list[_TurnOff] = []
        self._groups: list[_Group] = []
        self.whole = whole
        if not whole:
            mixed, divisible = _mixed_nodes(outputs, inputs)
            self.whole = not divisible
            self._turn_offs = _turn_offs(outputs, mixed) if divisible else []
        self._next = "input_half"

    def input_half(self, gradients: Gradients) -> list[torch.Tensor | None]:
        """Return the gradients of the inputs, given those of the outputs; None where there is none."""
        if self._next == "input_half" and len(gradients) != len(self._outputs):
            raise UsageError(f"{len(gradients)} gradients for {len(self._outputs)} outputs: give one for each")
        self._take_turn("input_half", "weight_half")
        outputs, inputs, turn_offs = self._outputs, self._inputs, self._turn_offs
        self._outputs, self._inputs, self._turn_offs = [], [], []  # from here on, only what the second half needs
        if self.whole:
            return _backward_at_once(outputs, inputs, gradients)
        with _watching(turn_offs, gradients):
            found = _gradients_of(inputs, outputs, gradients)
        self._groups = _groups(turn_off for turn_off in turn_offs if turn_off.kept)
        return found

    def weight_half(self) -> None:
        """Add the gradients of the weights to their `.grad`, and let go of the graph."""
        self._take_turn("weight_half", "")
        groups = self._groups[::-1]
        self._groups = []
        while groups:
            groups.pop().accumulate()  # in the order of the backward pass; each is freed when it is done

    def _take_turn(self, turn: str, following: str) -> None:
        """Each half runs once, the input half first."""
        if turn != self._next:
            wanted = f"{self._next}() comes next" if self._next else "both halves are done: build one per micro-batch"
            raise UsageError(f"{turn}() was called out of turn: {wanted}")
        self._next = following


class _TurnOff:
    """A place where gradients leave for weights alone, along `edges`: here, an output that depends on no input."""

    def __init__(self, edges: dict[int, GradientEdge]) -> None:
        self.edges = edges
        self.kept: Gradients = ()  # by the input half: here, the gradients that go along the edges, in their places

    def watch(self, gradients: Gradients) -> RemovableHandle | None:
        """Keep, while the input half runs, what is needed later."""
        kept = [gradients[place] if place in self.edges else None for place in range(len(gradients))]
        self.kept = kept if any(gradient is not None for gradient in kept) else ()
        return None

    def pass_on(self) -> list[tuple[GradientEdge, torch.Tensor]]:
        """The gradients that go along the edges, each with its edge."""
        pairs = ((edge, self.kept[place]) for place, edge in self.edges.items())
        return [(edge, gradient) for edge, gradient in pairs if gradient is not None]

    def accumulate(self, weights: Sequence[torch.Tensor]) -> None:  # noqa: ARG002
        """Add to the weights' gradients, when no other turn-off leads to any of them."""
        _backward(self.pass_on())


class _FunctionTurnOff(_TurnOff):
    """A mixed node written in Python: torch has it calculate all its gradients whenever it runs, so all are kept."""

    def __init__(self, node: Node, edges: dict[int, GradientEdge]) -> None:
        super().__init__(edges)
        self.node = node

    def watch(self, gradients: Gradients) -> RemovableHandle | None:  # noqa: ARG002
        """Keep what the node calculates for its edges."""

        def keep(calculated: Gradients, arrived: Gradients) -> None:  # noqa: ARG001
            self.kept = [gradient if place in self.edges else None for place, gradient in enumerate(calculated)]

        return self.node.register_hook(keep)


class _NodeTurnOff(_TurnOff):
    """A mixed node of torch's own: `kept` is what arrived there, and the gradients for its edges are still to do."""

    def __init__(self, node: Node, edges: dict[int, GradientEdge]) -> None:
        super().__init__(edges)
        self.node = node

    def watch(self, gradients: Gradients) -> RemovableHandle | None:  # noqa: ARG002
        """Keep what arrives at the node."""

        def keep(arrived: Gradients) -> None:
            self.kept = arrived

        return self.node.register_prehook(keep)

    def accumulate(self, weights: Sequence[torch.Tensor]) -> None:
        """Have torch's engine run the node and what lies between it and the weights, and nothing else."""
        arrived = cast("tuple[torch.Tensor, ...]", self.kept)
        starts = [(GradientEdge(self.node, place), gradient) for place, gradient in enumerate(arrived)]
        # Hooks of the node's own tensors see the gradient a second time; what they make of it is already in `arrived`.
        handle = self.node.register_prehook(lambda _: arrived)
        try:
            _backward([(edge, gradient) for edge, gradient in starts if gradient is not None], weights)
        finally:
            handle.remove()

    def pass_on(self) -> list[tuple[GradientEdge, torch.Tensor]]:
        """Call the node by hand: the engine would run on into the other turn-offs of the group."""
        calculated: list[Gradients] = []

        def call() -> None:
            result = cast("Callable[..., Any]", self.node)(*self.kept)
            calculated.append(result if isinstance(result, tuple) else (result,))

        _while_only_needing(self.edges.values(), call)
        pairs = ((edge, calculated[0][place]) for place, edge in self.edges.items())
        return [(edge, _fitted(gradient, edge)) for edge, gradient in pairs if gradient is not None]


class _Group:
    """The turn-offs that lead to some of the same weights."""

    def __init__(self) -> None:
        self.turn_offs: list[_TurnOff] = []
        self.weights: list[torch.Tensor] = []
        self._absorbed_by: _Group | None = None

    def absorb(self, other: _Group) -> None:
        """Take over another group's turn-offs."""
        self.turn_offs += other.turn_offs
        other._absorbed_by = self

    def final(self) -> _Group:
        """The group that this one is part of by now."""
        group = self
        while group._absorbed_by is not None:
            group = group._absorbed_by
        return group

    def accumulate(self) -> None:
        """Add to the weights' gradients, each once: a hook that waits for a gradient finds it complete."""
        if len(self.turn_offs) == 1:
            self.turn_offs[0].accumulate(self.weights)
        else:
            _backward([pair for turn_off in self.turn_offs for pair in turn_off.pass_on()])


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


def _turn_offs(outputs: Sequence[torch.Tensor], mixed: dict[Node, None]) -> list[_TurnOff]:
    """Every place where gradients leave for weights alone, in the order of the backward pass."""
    ends = [get_gradient_edge(output) for output in outputs]
    found = [_TurnOff({place: end}) for place, end in enumerate(ends) if end.node not in mixed]
    for node in reversed(mixed):
        following = enumerate(node.next_functions)
        edges = {place: GradientEdge(child, number) for place, (child, number) in following if child is not None}
        edges = {place: edge for place, edge in edges.items() if edge.node not in mixed}
        if edges:
            kind = _FunctionTurnOff if issubclass(type(node), BackwardCFunction) else _NodeTurnOff
            found.append(kind(node, edges))
    return found


def _groups(turn_offs: Iterable[_TurnOff]) -> list[_Group]:
    """Put together the turn-offs that lead to a common node; each node is looked at once."""
    owner: dict[Node, _Group] = {}
    groups: dict[_Group, None] = {}
    for turn_off in turn_offs:
        group = _Group()
        group.turn_offs.append(turn_off)
        groups[group] = None
        stack = [edge.node for edge in turn_off.edges.values()]
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
    """Whether what the node saved must be calculated anew each time torch's engine starts (checkpoints of today)."""
    return any(getattr(hook, "__module__", "") == "torch.utils.checkpoint" for hook in hooks_of_saved(node))


@contextlib.contextmanager
def _watching(turn_offs: Sequence[_TurnOff], gradients: Gradients) -> Iterator[None]:
    """Have each turn-off keep what passes it."""
    handles = [turn_off.watch(gradients) for turn_off in turn_offs]
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
    """Both halves in one pass; the inputs' gradients are taken off again, so that they are left as they were."""
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
    """Run torch's engine from some edges: to these weights, or to all it can reach."""
    if starts:
        edges, gradients = zip(*starts, strict=True)
        torch.autograd.backward(edges, gradients, inputs=weights)


def _while_only_needing(edges: Iterable[GradientEdge], call: Callable[[], None]) -> None:
    """Call a function while torch's engine wants gradients for these edges alone.

    A node that is called meanwhile leaves out the rest (if a torch did not know this, it would calculate too much,
    but nothing wrong). The engine wants them if it is asked for them, even in a graph that does not lead there.
    """
    leaf = torch.zeros((), requires_grad=True)
    with torch.enable_grad():
        root = leaf.clone()
    cast("Node", root.grad_fn).register_prehook(lambda _: call())
    torch.autograd.grad([root], [get_gradient_edge(leaf), *edges], allow_unused=True)


def _fitted(gradient: torch.Tensor, edge: GradientEdge) -> torch.Tensor:
    """What the engine does to gradients between nodes: undo broadcasting, and give them the tensor's dtype."""
    wanted = what_arrives_at(edge)
    return gradient.sum_to_size(wanted.shape).to(wanted.dtype)
