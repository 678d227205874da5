"""Pipeline: a model cut into stages, one or more on each rank, and a schedule that keeps all of them busy."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import torch
from torch import nn

from microparallel.comms import Comms
from microparallel.comms.record import Recorder
from microparallel.comms.wire import gather_json
from microparallel.compression import Cast, Compressor, parse
from microparallel.data_parallel.compressed_bucket import as_compressor
from microparallel.data_parallel.precision import LossScale, Precision, as_precision
from microparallel.errors import TransportError, UsageError
from microparallel.observe import Activity, Observation
from microparallel.pipeline.activations import ActivationWire, as_activation_wire
from microparallel.pipeline.cut import cut_together, warn_of_whole_models
from microparallel.pipeline.generate import Prompt, generate
from microparallel.pipeline.interpreter import Interpreter, Microbatch, Worker
from microparallel.pipeline.layers import NamedLayer
from microparallel.pipeline.member import LossSum, Member, beside_earlier_gradients
from microparallel.pipeline.microbatches import Share, batch_size, join_batch, split_batch
from microparallel.pipeline.parts import Part, as_plain
from microparallel.pipeline.precision import StagePrecision
from microparallel.pipeline.programs import Schedule
from microparallel.pipeline.shapes import BatchShapes, Shapes
from microparallel.pipeline.stage import LossFunction, Stage
from microparallel.program import BATCH, LOSS, WORLD, Act, AllReduce, Broadcast, Op, Program, Recv, Send
from microparallel.program.ops import Observed
from microparallel.schedules.replicas import only_sums, shifted
from microparallel.topology import Mesh
from microparallel.trace import Trace

_AHEAD = 2  # receives that are posted before they are needed


class Pipeline(Member):
    """A model whose layers are spread over the ranks, trained on micro-batches that follow each other through it.

    Every rank builds the same model, and keeps the layers of its own stages. After a step the parameters of this rank
    have the gradients of the whole batch's mean loss, as after `loss.backward()` in one process; the caller's optimizer
    updates them. To clip them, call `pipe.clip_grad_norm_`: torch's would see this rank's layers alone, and is refused.

    Args:
        layers: an `nn.Sequential`, a list of layers, or a model with a method `pipeline_layers()`; each layer takes
            what the one before it returned. For a model with a forward of its own, such as those of Hugging Face:
            `mp.pipeline_layers(model)`.
        comms: the ranks. With `replicas`, there are that many pipelines among them: ranks 0 to p-1 are the first.
        schedule: `naive`, `gpipe`, `1f1b`, `interleaved`, `zb-h1`, `zb-h2`, `zbv` or `dualpipev`; or a program.
        microbatches: into how many micro-batches a batch is cut; a program says so itself.
        loss_fn: takes the last layer's outputs and the targets, and returns the mean loss over the samples. Where the
            mean is over something else, such as the tokens that are not padding, it returns a tuple `(sum, count)`:
            then the loss of the batch is the sum of all sums over the sum of all counts, whatever the micro-batches.
        balance: where to cut: "parameters" (and "auto") so that stages have equally many, "time" so that they take
            equally long on `example`, or the numbers of layers, such as [3, 4, 5, 4].
        replicas: how many pipelines there are, each on samples of its own; their gradients are summed.
        stages_per_rank: how many stages each rank has, where the schedule leaves that open (interleaved).
        example: a batch to measure layers on, for balance="time".
        recompute: keep only what enters a stage, and compute its activations again when its backward comes
            (activation checkpointing).
        bucket_cap_mb: replicas sum their gradients in buckets of so many megabytes.
        shard: "optimizer": of the optimizer's state each replica keeps its part (ZeRO 1). The optimizer must be a
            `mp.ShardedOptimizer`, and gradients are clipped with `pipe.clip_grad_norm_`. After a step, `grad` of a
            parameter only says that there is a gradient: no rank has it whole. With one replica nothing is in parts.
        compress: how replicas compress the gradients that they sum, as for `DataParallel`. A stage's gradients are one
            bucket, whatever `bucket_cap_mb` is, and small ones go with them as they are.
        compress_activations: in which form stages send each other activations and their gradients:
            `mp.compression.Cast(torch.bfloat16)`, `mp.compression.Int8()`, or "bf16", "fp16", "int8".
        precision: "float32", "bf16", "fp16", "float64" or an `mp.MixedPrecision`; None: the model stays as it is. The
            parameters are converted to its `master` dtype. Stages compute with copies in `compute`, and send each other
            activations and gradients in it; `loss_fn` gets the last stage's outputs in `master`, and so are gradients.
            Replicas send each other gradients in `reduce`, and add them up in float32.
            With float16, gradients are scaled on their way through the stages (`pipe.loss_scale`). If some are not
            finite on any stage of any replica, no rank has gradients after that step, so optimizers do nothing, and
            the scale is halved.

    Example:
        ```python
        def train(comms):
            torch.manual_seed(0)
            model = mp.models.FullMLP(64, depth=8)
            pipe = mp.Pipeline(model, comms, schedule="1f1b", microbatches=8, loss_fn=torch.nn.functional.cross_entropy)
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            for inputs, targets in batches:
                optimizer.zero_grad()
                loss = pipe.step(inputs, targets)
                optimizer.step()

        mp.launch(train, ranks=4)
        ```
    """

    _wire: ActivationWire | None

    def __init__(
        self,
        layers: nn.Module | Sequence[nn.Module],
        comms: Comms,
        schedule: str | Program = "1f1b",
        microbatches: int = 8,
        loss_fn: LossFunction | None = None,
        balance: str | Sequence[int] = "auto",
        *,
        replicas: int = 1,
        stages_per_rank: int | None = None,
        example: Any = None,
        recompute: bool = False,
        bucket_cap_mb: float = 25.0,
        shard: Literal["optimizer"] | None = None,
        compress: str | Compressor | None = None,
        compress_activations: str | Compressor | None = None,
        precision: Precision | None = None,
    ) -> None:
        mesh = _mesh(comms, replicas)
        _require_shard(shard)
        dtypes = as_precision(precision, "Pipeline")
        numbers = StagePrecision(dtypes, LossScale() if dtypes is not None and dtypes.scales_loss else None)
        compressor = parse(compress) if isinstance(compress, str) else compress
        if compressor is not None and shard is not None:
            raise UsageError(
                f"Pipeline: compress={compressor.name} with shard={shard!r}: a compressed sum leaves each replica with "
                "all gradients, and shard= with its part; choose one of the two"
            )
        chosen = Schedule(schedule, mesh.pp, microbatches, stages_per_rank)
        self._wire = as_activation_wire(compress_activations)
        settings = [
            f"precision={dtypes}",
            f"compress={compressor and compressor.description}, compress_activations={self._wire}",
        ]
        pieces = cut_together(layers, chosen.stages, balance, example, comms, *settings)
        warn_of_whole_models(pieces)
        stages = {
            index: Stage(index, pieces[index], loss_fn, recompute, numbers, sum(map(len, pieces[:index])))
            for index, home in enumerate(chosen.homes)
            if home == mesh.where(comms.rank)[1]
        }
        if compressor is None and shard is None and dtypes is not None and dtypes.wire is not None:
            compressor = Cast(dtypes.wire, smallest=0)
        if compressor is not None:
            for stage in stages.values():
                as_compressor(compressor, nn.ModuleList(layer.module for layer in stage.layers))
        level = int(shard is not None)
        super().__init__(comms, mesh, chosen.homes, stages, bucket_cap_mb, level, compressor, numbers)
        self._prepare(chosen)
        self._tie(pieces)
        self._name_sums(pieces)
        self._find_buffers(pieces)
        self._knows_loss = loss_fn is not None

    @classmethod
    def of_stage(
        cls,
        module: nn.Module,
        comms: Comms,
        schedule: str = "1f1b",
        microbatches: int = 8,
        *,
        loss_fn: LossFunction | None = None,
    ) -> Pipeline:
        """A pipeline of modules that were cut already: each rank brings its own, such as `mp.models.ShardedMLP`.

        Without a `loss_fn`, the last rank's module is called with the targets and returns the mean loss.
        """
        pipe = cls.__new__(cls)
        pipe._wire = None
        chosen = Schedule(schedule, comms.world_size, microbatches)
        if chosen.homes != list(range(comms.world_size)):
            raise UsageError(
                f"schedule={schedule!r} gives a rank several stages; mp.Pipeline cuts a whole model for it"
            )
        stage = Stage(comms.rank, [NamedLayer("", module)], loss_fn)
        Member.__init__(pipe, comms, Mesh(1, comms.world_size), chosen.homes, {comms.rank: stage}, bucket_cap_mb=25.0)
        pipe._prepare(chosen)
        pipe._knows_loss = True
        return pipe

    def _prepare(self, schedule: Schedule) -> None:
        self.most_activations = 0  # that this rank held at once in the last step
        self._schedule = schedule
        for index, stage in self.stages.items():
            stage.splits = index in schedule.split_stages
            stage.is_last = index == schedule.stages - 1
        self._shapes = {training: Shapes(self._row, schedule, self.stages, training) for training in (True, False)}

    # ── a step ──────────────────────────────────────────────────────────────────────────────────────────────────

    def step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        weight: torch.Tensor | None = None,
        samples: int | None = None,
        allow_fewer: bool = False,
    ) -> torch.Tensor:
        """Do the forward and backward of one batch, and return its mean loss, the same on every rank.

        Gradients accumulate in the parameters of this rank's stages, as after `loss.backward()`.

        Each micro-batch counts by its number of samples. This is wrong for a loss that is a mean over tokens of which
        some are padding: a micro-batch with much padding would count as much as one without. Then let `loss_fn` return
        `(sum, count)`, or pass the `weight` of each sample.

        Args:
            inputs: the batch: a tensor, or a tuple, dict or other mapping of them; needed by the rank with the first
                stage.
            targets: what the outputs are compared with; needed by the rank with the last stage.
            weight: for how much each sample counts, such as its number of tokens, where `loss_fn` returns the mean over
                those; a tensor with a row for each sample, whose numbers are added up (so `attention_mask` will do).
                Needed by the rank with the last stage.
            samples: of all replicas together, where they have different numbers of them. A replica that has none
                passes no inputs.
            allow_fewer: cut a batch with fewer samples than micro-batches into fewer, instead of refusing it.
        """
        loss, _ = self._step([Share(inputs, targets)], weight, samples, allow_fewer)
        return loss

    def step_in_shares(self, shares: Sequence[Share], microbatches: int, *, samples: int) -> torch.Tensor:
        """Do a step of a batch that comes in shares, each of which is cut into micro-batches by itself; as `step`.

        Then another number of pipelines, each with other shares, does the same step up to rounding: a run may go on
        with fewer. On each pipeline, buffers such as BatchNorm's running statistics learn from its first share alone.

        Args:
            shares: those of this pipeline, on each of its ranks (`microparallel.pipeline.Share`); none where it has no
                samples.
            microbatches: into how many each is cut; one with fewer samples into as many as it has samples. All shares
                of a pipeline together have at most as many as the pipeline was made for.
            samples: of all pipelines together.
        """
        if len(shares) * microbatches > self._schedule.microbatches:
            raise UsageError(
                f"step_in_shares: {len(shares)} shares of {microbatches} micro-batches, and this pipeline was made "
                f"with microbatches={self._schedule.microbatches}; make it with {len(shares) * microbatches}"
            )
        loss, _ = self._step(shares, None, samples, allow_fewer=True, microbatches=microbatches)
        return loss

    def traced_step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        weight: torch.Tensor | None = None,
        samples: int | None = None,
        allow_fewer: bool = False,
    ) -> tuple[torch.Tensor, Trace]:
        """Do a step, and return its trace as well: what every rank did, and when."""
        recorder = Recorder(self.comms)
        self.comms.barrier()
        recorder.start()
        try:
            loss, count = self._step([Share(inputs, targets)], weight, samples, allow_fewer)
        finally:
            recorder.stop()
        counts = gather_json(count, self.comms)  # a replica with fewer samples may have fewer micro-batches, or none
        trace = recorder.gather({})
        events = [event for event in trace.events if not isinstance(event.op, Observed)]
        each = [counts[self.mesh.rank(replica, 0)] for replica in range(self.mesh.dp)]
        program = self.program_with(each if any(each) else None, samples=samples is None, update=False)
        return loss, replace(trace, events=events, program=program)

    @property
    def program(self) -> Program:
        """The program of a step, on all ranks, up to the caller's optimizer; `program_with` has other steps.

        With `shard` the optimizer's step belongs to it, since ranks gather what others have updated.
        """
        return self.program_with()

    def program_with(
        self,
        microbatches: Sequence[int] | None = None,
        *,
        samples: bool = True,
        norm: bool = False,
        buffers: bool = False,
        update: bool | None = None,
    ) -> Program:
        """The program of a step with fewer micro-batches, or with the sums that its caller does after it.

        Args:
            microbatches: how many each replica has, where batches have fewer samples than that (`allow_fewer`); a
                replica without samples has 0, and takes part in the sums.
            samples: whether the replicas add up their samples, which they do unless `step(samples=…)` is used.
            norm: whether `clip_grad_norm_` follows.
            buffers: whether `broadcast_buffers` follows.
            update: whether the optimizer's step is part of it; None: with `shard` it is.

        Example:
            ```python
            print(mp.draw(pipe.program_with(norm=True)))
            ```
        """
        usual = self._schedule.microbatches
        each = (usual,) * self.mesh.dp if microbatches is None else tuple(microbatches)
        if len(each) != self.mesh.dp or not all(0 <= count <= usual for count in each) or not any(each):
            raise UsageError(
                f"microbatches={list(each)}: give {self.mesh.dp} numbers from 0 to {usual}, one for each pipeline, "
                "and not all of them 0"
            )
        return self._schedule.whole(
            each,
            self._shared_places,
            self._tied_places,
            samples=samples,
            overflow=self.loss_scale is not None,
            norm=norm,
            buffers=self._buffered_places if buffers else (),
            level=self._column.level,
            update=update,
            algorithm=self._algorithm(),
        )

    def _step(
        self,
        shares: Sequence[Share],
        weight: torch.Tensor | None,
        samples: int | None,
        allow_fewer: bool,
        microbatches: int | None = None,
    ) -> tuple[torch.Tensor, int]:
        """Do a step; returns the loss, and into how many micro-batches this rank's batch was cut."""
        shares = [self._as_computed(share) for share in shares]
        self._require_batch("step", shares, samples)
        shapes = self._agree(True, shares, allow_fewer, microbatches)
        self._require_targets("step", shapes, shares)
        total = self._samples_of_all(shapes.samples) if samples is None else samples
        worker = self._worker(shapes, shares, weight, total)
        loss_sum = LossSum(worker, self.comms, total)
        self._column.prepare()
        if self.loss_scale is not None:
            self._column.multiply_on_wire(self.loss_scale.value)
        if self._guard is not None and self._guard.begins:
            self._column.keep_residuals()
        with (
            self._column.beside_earlier_parts(),
            beside_earlier_gradients(self.parameters(), self._summed_parameters()),
            torch.enable_grad(),
            self._precision.computing(),
        ):
            count = len(shapes.microbatches)
            self._run(self._ops(count), worker, self._message_order(count, training=True), loss_sum)
            self._scale_gradients(loss_sum.factor)
        self._column.passes += 1
        if self._guard is not None and self._guard.overflow:
            self._remove_gradients()
            self._column.give_residuals_back()
        self._refuse_norms()
        self.most_activations = worker.most_kept
        return loss_sum.loss, count

    def _ops(self, microbatches: int) -> Sequence[Op]:
        """The operations of this rank, numbered as in a single pipeline; without samples, only its sums."""
        ops = self._own_ops(microbatches or self._schedule.microbatches, self._algorithm())
        return ops if microbatches else only_sums(ops)

    @functools.cache  # noqa: B019 a pipeline has few programs
    def _own_ops(self, microbatches: int, _algorithm: str | tuple[str, ...]) -> Sequence[Op]:
        """The second argument is for the cache: after the warm-up sums are compressed."""
        whole = self.program_with([microbatches] * self.mesh.dp, samples=False, update=False)  # _step has counted them
        before = (-self.replica * self._schedule.microbatches, -self.replica * self.mesh.pp)
        # The broadcast of the batch's shapes is done before, in _agree.
        return [shifted(op, *before) for op in whole.ranks[self.comms.rank] if not isinstance(op, Broadcast)]

    def _in_program(self, op: Op) -> Op:
        """An operation with the numbers that it has in the program of all pipelines."""
        return shifted(op, self.replica * self._schedule.microbatches, self.replica * self.mesh.pp)

    def _message_order(self, microbatches: int, training: bool) -> Sequence[Send | Recv] | None:
        """The messages of this rank in the order that all ranks keep, if the transport runs them one after another."""
        if not microbatches or not self.comms.messages_run_in_order:
            return None
        return self._schedule.message_orders(microbatches, training)[self._place]

    def _as_computed(self, share: Share) -> Share:
        """A share as the layers take it."""
        return replace(share, inputs=self._precision.inside(as_plain(share.inputs)), targets=as_plain(share.targets))

    def _worker(self, shapes: BatchShapes, shares: Sequence[Share], weight: torch.Tensor | None, total: int) -> Worker:
        boundaries = iter(shapes.microbatches)
        microbatches: list[Microbatch] = []
        for number, lengths in enumerate(shapes.lengths):
            share = shares[number] if number < len(shares) else Share()  # needed on some of the ranks alone
            parts = self._split(share.inputs, self._has_first, lengths, "inputs")
            answers = self._split(share.targets, self._has_last, lengths, "targets")
            weights = self._split(weight, self._has_last, lengths, "weights")
            for index, (part, answer, counts) in enumerate(zip(parts, answers, weights, strict=True)):
                one = Microbatch(
                    next(boundaries),
                    part,
                    answer,
                    lengths[index] / total,
                    1 / total,
                    None if counts is None else float(counts.sum()),
                    None if share.before_layer is None else functools.partial(share.before_layer, index),
                    moves_buffers=number == 0,
                )
                microbatches.append(one)
        for share in shares[len(shapes.lengths) :]:  # the rank with the first stage was given no inputs
            self._split(share.targets, self._has_last, [], "targets")
        return Worker(self.comms.rank, self.stages, self._schedule.stages - 1, microbatches, self.comms.device)

    def _split(self, batch: Any, needed: bool, lengths: Sequence[int], what: str) -> list[Any]:
        if not needed or batch is None:
            return [None] * len(lengths)
        samples = batch_size(batch, what)
        if samples != sum(lengths):
            raise UsageError(f"rank {self.comms.rank} was given {samples} {what}, and the batch has {sum(lengths)}")
        return split_batch(batch, len(lengths), what)

    def _run(
        self, ops: Sequence[Op], worker: Worker, message_order: Sequence[Send | Recv] | None, loss_sum: LossSum
    ) -> None:
        interpreter = Interpreter(
            ops,
            worker,
            self._row.messages,
            {**self._sums, LOSS: loss_sum},
            ahead=_AHEAD,
            message_order=message_order,
            observers=self.comms.observers,
            in_program=self._in_program,
            world_ranks=self._row.world_ranks,
            doing=self.comms.flight.doing,
            wire=self._wire,
        )
        try:
            for work in interpreter.run():
                work.wait()
        except TransportError as error:
            doing = _in_words(interpreter.now, self._row.world_ranks)
            raise self._row.explain(error, f"the pipeline's {doing}") from error

    def _agree(
        self, training: bool, shares: Sequence[Share], allow_fewer: bool, microbatches: int | None = None
    ) -> BatchShapes:
        """Learn from the rank with the first stage how many samples come, and in which shapes."""
        operation = Broadcast(BATCH, "pp", self.mesh.rank(self.replica, self._homes[0]))
        activity = Activity(operation, group=tuple(self._row.world_ranks))
        try:
            with Observation(self.comms.observers if self.mesh.pp > 1 else (), activity) as told:
                told.waits()
                given = [share.inputs for share in shares if share.inputs is not None]
                return self._shapes[training].agree(given, microbatches or self._schedule.microbatches, allow_fewer)
        except TransportError as error:
            raise self._row.explain(error, "the pipeline's exchange of the batch's shapes") from error

    def _require_batch(self, call: str, shares: Sequence[Share], samples: int | None) -> None:
        if not self._knows_loss:
            raise UsageError(f"{call}: this pipeline has no loss_fn; pass loss_fn= to mp.Pipeline")
        if samples is not None:  # then a replica may have none
            return
        for name, needed in (("inputs", self._has_first), ("targets", self._has_last)):
            if needed and any(getattr(share, name) is None for share in shares):
                stage = "first" if name == "inputs" else "last"
                raise UsageError(f"{call}: rank {self.comms.rank} has the {stage} stage, and was given no {name}")

    def _require_targets(self, call: str, shapes: BatchShapes, shares: Sequence[Share]) -> None:
        given = [share for share in shares if share.targets is not None]
        if self._has_last and len(given) < len(shapes.lengths):
            raise UsageError(
                f"{call}: rank {self.comms.rank} has the last stage, and was given no targets for its pipeline's "
                f"{shapes.samples} samples"
            )

    # ── forwards alone ──────────────────────────────────────────────────────────────────────────────────────────

    def evaluate(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        weight: torch.Tensor | None = None,
        samples: int | None = None,
    ) -> torch.Tensor:
        """Return the mean loss of a batch, the same on every rank, in evaluation mode and without gradients.

        The arguments are those of `step`. The batch may have fewer samples than there are micro-batches.
        """
        share = self._as_computed(Share(inputs, targets))
        self._require_batch("evaluate", [share], samples)
        loss_sum, shapes, _ = self._forwards(share, weight, samples)
        self._require_targets("evaluate", shapes, [share])
        loss_sum.start(AllReduce(LOSS, WORLD))
        return loss_sum.loss

    def predict(self, inputs: Any = None) -> Any:
        """Return the last stage's outputs on the rank that has it, and None on all others.

        The ranks of one pipeline call this together; other replicas need not.
        """
        if self._has_first and inputs is None:
            raise UsageError(f"predict: rank {self.comms.rank} has the first stage, and was given no inputs")
        _, shapes, worker = self._forwards(self._as_computed(Share(inputs)), None, samples=1)  # there is no loss
        return (
            join_batch([worker.outputs[number] for number in range(len(shapes.microbatches))])
            if self._has_last
            else None
        )

    def _forwards(
        self, share: Share, weight: torch.Tensor | None, samples: int | None
    ) -> tuple[LossSum, BatchShapes, Worker]:
        modules = [module for layer in self._layers() for module in layer.module.modules()]
        modes = [module.training for module in modules]
        for layer in self._layers():
            layer.module.eval()
        try:
            with torch.no_grad(), self._precision.computing():
                shapes = self._agree(False, [share], allow_fewer=True)
                total = self._samples_of_all(shapes.samples) if samples is None else samples
                worker = self._worker(shapes, [share], weight, total)
                loss_sum = LossSum(worker, self.comms, total)
                if count := len(shapes.microbatches):
                    ops = self._schedule.forwards(count).ranks[self._place]
                    self._run(ops, worker, self._message_order(count, training=False), loss_sum)
                return loss_sum, shapes, worker
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode

    def generate(
        self,
        input_ids: torch.Tensor,
        max_new_tokens: int,
        *,
        attention_mask: torch.Tensor | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int = 0,
        decoder_start_token_id: int | None = None,
    ) -> torch.Tensor:
        """Append the likeliest tokens to prompts, one at a time (greedy); return the sequences, on every rank.

        Every rank passes the same prompts; with replicas, each pipeline has its own. Each new token costs a forward of
        all tokens so far: there is no cache of keys and values. The model's output is logits, or has them as `logits`.
        An encoder-decoder returns what the decoder wrote.

        Args:
            input_ids: the prompts, of shape (prompts, tokens); shorter ones are padded on the left.
            max_new_tokens: how many tokens to append.
            attention_mask: 0 where a prompt is padded, else 1.
            eos_token_id: a sequence ends with this token; when all have ended, so does the generation.
            pad_token_id: what follows in a sequence that has ended.
            decoder_start_token_id: with what the decoder of an encoder-decoder begins.
        """
        if max_new_tokens < 0 or input_ids.dim() != 2:
            raise UsageError(
                f"generate: max_new_tokens={max_new_tokens} and input_ids of shape {list(input_ids.shape)}: pass a "
                "number of at least 0, and a tensor of prompts × tokens"
            )
        parts = [layer.module for layer in self._layers() if isinstance(layer.module, Part)]
        prompt = Prompt(input_ids, attention_mask, parts[0].takes if parts else frozenset(), decoder_start_token_id)
        with torch.no_grad(), self._precision.computing():  # one copy of each parameter for all tokens
            return generate(prompt, max_new_tokens, self._logits, self._from_last, eos_token_id, pad_token_id)

    def _from_last(self, found: torch.Tensor) -> torch.Tensor:
        """What the rank with the last stage found."""
        return self._row.broadcast(found.to(self.comms.device), self._homes[-1])

    def _logits(self, batch: Any) -> torch.Tensor | None:
        outputs = self.predict(batch if self._has_first else None)
        logits: torch.Tensor | None = getattr(outputs, "logits", outputs)
        return logits

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Give this rank's layers another dtype, as in `pipe.to(torch.float64)`; every rank calls this.

        A rank's device is that of its Comms, and cannot be changed.
        """
        probe = torch.empty(0, device=self.comms.device).to(*args, **kwargs)
        if probe.device != torch.empty(0, device=self.comms.device).device:
            raise UsageError(
                f"to: rank {self.comms.rank} is on {self.comms.device}, and its layers with it: the device of a Comms "
                "cannot be changed"
            )
        dtypes = {torch.empty(0, dtype=one).to(*args, **kwargs).dtype for one in (torch.float16, torch.float32)}
        if self.precision is not None and len(dtypes) == 1:
            raise UsageError(
                f"to: this pipeline was made with precision={self.precision}, which says what its dtypes are; make "
                "another pipeline"
            )
        self._column.forget_buckets()
        for layer in self._layers():
            layer.module.to(*args, **kwargs)
            if isinstance(layer.module, Part) and len(dtypes) == 1:
                layer.module.follow_dtype(*dtypes)
        self._prepare(self._schedule)  # other shapes and dtypes will be sent
        return self

    def __repr__(self) -> str:
        where = ", ".join(f"stage {index}" for index in self.stages)
        return f"<Pipeline {self.program.name} of {self._schedule.stages} stages: rank {self.comms.rank} has {where}>"


def _mesh(comms: Comms, replicas: int) -> Mesh:
    if replicas < 1 or comms.world_size % replicas:
        raise UsageError(
            f"replicas={replicas}: {comms.world_size} ranks cannot be shared out evenly among that many pipelines"
        )
    return Mesh(replicas, comms.world_size // replicas)


def _require_shard(shard: str | None) -> None:
    if shard == "gradients":
        raise UsageError(
            "Pipeline: shard='gradients' would sum gradients after every micro-batch, and a pipeline adds up those of "
            "all micro-batches and sums them once; choose shard='optimizer'"
        )
    if shard not in (None, "optimizer"):
        raise UsageError(f"Pipeline: shard={shard!r}; choose None or 'optimizer'")


def _in_words(op: Op | None, world_ranks: Sequence[int]) -> str:
    if isinstance(op, Recv | Send):
        what = "output" if isinstance(op.value, Act) else "gradient of the output"
        way = _way(op, world_ranks)
        return f"{way} of the {what} of {op.value} (stage.micro-batch)"
    return str(op)


def _way(op: Send | Recv, world_ranks: Sequence[int]) -> str:
    if isinstance(op, Recv):
        return f"receive from rank {world_ranks[op.source]}"
    return f"send to rank {world_ranks[op.to]}"
