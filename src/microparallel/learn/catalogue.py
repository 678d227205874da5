"""The exercises, in the order in which the course takes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from microparallel.errors import UsageError
from microparallel.text import did_you_mean

_ON_DEADLOCKS = (
    "data_parallel/05_sync_primitives",
    "data_parallel/06_all_reduce",
    "pipeline/03_ping_pong",
    "pipeline/06_1f1b",
)
_ON_DEADLOCKS_OF = {
    "data_parallel": _ON_DEADLOCKS[0],
    "pipeline": _ON_DEADLOCKS[-1],
    "sharding": _ON_DEADLOCKS[1],
    "fewer_bytes": _ON_DEADLOCKS[1],
    "surviving": _ON_DEADLOCKS[1],
    "capstones": _ON_DEADLOCKS[-1],
}
_HERE = Path(__file__).parent
_INSTALLED = _HERE / "exercises"
_IN_REPOSITORY = _HERE.parents[2] / "exercises"


@dataclass(frozen=True, slots=True)
class Exercise:
    """A file with a hole in it, three hints and a solution."""

    name: str
    track: str  # the folder it lies in
    file: str
    title: str
    lesson: str  # below docs/, without its ending

    @property
    def task(self) -> Path:
        """The file with the hole."""
        return exercises_folder() / self.track / self.file

    @property
    def solution(self) -> Path:
        """The file without the hole; what the learner gets is made of this one (see holes.py)."""
        return exercises_folder() / "solutions" / self.track / self.file

    @property
    def hints(self) -> list[str]:
        """Three hints, each saying more than the one before."""
        text = (exercises_folder() / "hints" / self.track / self.file).with_suffix(".md").read_text("utf-8")
        return [hint.strip() for hint in text.split("\n---\n")]

    @property
    def on_deadlocks(self) -> str:
        """The page that says how ranks come to wait for each other: the exercise's own lesson, if it is about that."""
        another = _ON_DEADLOCKS_OF[self.track]
        return f"docs/{self.lesson if self.lesson in _ON_DEADLOCKS else another}.md"

    @property
    def grader(self) -> str:
        """The module that checks this exercise."""
        return f"microparallel.learn.graders.{self.file[3:].removesuffix('.py')}"


def exercises_folder() -> Path:
    """Where the exercises are: beside this file in an installed package, else at the top of the repository."""
    return _INSTALLED if _INSTALLED.is_dir() else _IN_REPOSITORY


def _track(track: str, *exercises: tuple[str, ...]) -> Iterator[Exercise]:
    """The exercises of a track, numbered in order: each a file's stem, a title, a lesson, and a name if not the stem.

    A lesson of another track is given with its folder.
    """
    for number, (stem, title, lesson, *named) in enumerate(exercises, 1):
        name = named[0] if named else stem.replace("_", "-")
        place = lesson if "/" in lesson else f"{track}/{lesson}"
        yield Exercise(name, track, f"{number:02}_{stem}.py", title, place)


EXERCISES = (
    *_track(
        "data_parallel",
        ("manual_averaging", "Average the gradients of two copies by hand", "03_manual"),
        ("replicas", "Copy the model to every device, average on the CPU", "03_manual"),
        ("comms", "Broadcast, gather and barrier from sends and receives", "05_sync_primitives"),
        ("naive_all_reduce", "All-reduce through rank 0", "06_all_reduce"),
        ("ring_all_reduce", "All-reduce round the ring", "06_all_reduce"),
        ("hierarchical_all_reduce", "All-reduce with few bytes between hosts", "06_all_reduce", "hierarchical"),
        ("all_to_all", "Send every token to the rank of its expert, and back", "05_sync_primitives"),
        ("model_and_main", "Train one model on several ranks", "07_naive"),
        ("hooks", "Average each gradient as soon as it is there", "08_hooks"),
        ("buckets", "Send gradients in buckets, while backward still computes", "09_bucketing"),
        ("accumulation", "Add up gradients over micro-batches, and send them once", "10_batching"),
        ("parameter_averaging", "Average weights every few steps, with all their state", "10_batching"),
        ("performance", "Say where the time of a step went", "11_performance"),
        ("read_a_hang", "Say which rank of a hang is to blame", "seeing/hangs"),
    ),
    *_track(
        "pipeline",
        ("manual_split", "Cut a model in two and hand the gradient over", "02_manual"),
        ("ping_pong", "Pass a tensor back and forth", "03_ping_pong"),
        ("pipeline_comms", "Send a tensor to a neighbour that does not know its shape", "03_ping_pong"),
        ("sharded_model", "Give every rank its own layers", "04_naive"),
        ("naive_pipeline", "One batch through all stages and back", "04_naive"),
        ("gpipe", "Fill the pipeline with micro-batches, then drain it", "05_gpipe"),
        ("one_f_one_b", "One forward, one backward", "06_1f1b", "1f1b"),
        ("interleaved", "Several thin stages of the model on every rank", "07_interleaved"),
        ("zero_bubble", "Split the backward and fill the gaps", "08_zero_bubble"),
    ),
    *_track(
        "sharding",
        ("ring_halves", "Reduce-scatter and all-gather round the ring", "02_two_halves"),
        ("sharded_optimizer", "Keep the optimizer's state for your own part only", "03_each_its_part"),
        ("zero_2", "Keep your part of the gradients while they add up", "03_each_its_part"),
        ("sharded_linear", "Gather a layer's weight where it is used, and let it go", "04_gathered_on_demand"),
        ("zero_3", "Gather units ahead, and keep few of them whole", "04_gathered_on_demand"),
    ),
    *_track(
        "fewer_bytes",
        ("loss_scaling", "Scale the loss, and skip a step on all ranks together", "01_half_the_bytes"),
        ("topk_feedback", "Send the largest gradients, and keep the rest for later", "02_send_only_what_matters"),
        ("powersgd", "Two thin matrices instead of a gradient", "02_send_only_what_matters"),
    ),
    *_track(
        "surviving",
        ("kill_and_resume", "Die at any moment, and end with the same weights", "01_what_if_a_rank_dies"),
    ),
    *_track(
        "capstones",
        ("trainer", "A data-parallel trainer that survives a kill", "01_trainer"),
        ("gpt_pipeline", "A pipeline for a small GPT, within a limit of memory", "02_gpt_pipeline"),
        ("beat_1f1b", "A schedule that beats 1F1B on an uneven machine", "03_beat_1f1b"),
    ),
)


def find_exercise(name: str) -> Exercise:
    """The exercise of that name, or whose file has that name or path."""
    wanted = name.casefold().replace("_", "-")
    for exercise in EXERCISES:
        if wanted in (exercise.name, exercise.file[3:-3].replace("_", "-")) or Path(name).name == exercise.file:
            return exercise
    names = [exercise.name for exercise in EXERCISES]
    advice = did_you_mean(wanted, names, "microparallel learn list shows them all")
    raise UsageError(f"there is no exercise {name!r}: {advice}")
