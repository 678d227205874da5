"""The exercises, in the order in which the course takes them."""

from __future__ import annotations

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


def _dp(number: int, stem: str, title: str, lesson: str, name: str = "") -> Exercise:
    name = name or stem.replace("_", "-")
    return Exercise(name, "data_parallel", f"{number:02}_{stem}.py", title, f"data_parallel/{lesson}")


def _pp(number: int, stem: str, title: str, lesson: str, name: str = "") -> Exercise:
    return Exercise(name or stem.replace("_", "-"), "pipeline", f"{number:02}_{stem}.py", title, f"pipeline/{lesson}")


def _sh(number: int, stem: str, title: str, lesson: str) -> Exercise:
    return Exercise(stem.replace("_", "-"), "sharding", f"{number:02}_{stem}.py", title, f"sharding/{lesson}")


def _fb(number: int, stem: str, title: str, lesson: str) -> Exercise:
    return Exercise(stem.replace("_", "-"), "fewer_bytes", f"{number:02}_{stem}.py", title, f"fewer_bytes/{lesson}")


def _sv(number: int, stem: str, title: str, lesson: str) -> Exercise:
    return Exercise(stem.replace("_", "-"), "surviving", f"{number:02}_{stem}.py", title, f"surviving/{lesson}")


def _cap(number: int, stem: str, title: str) -> Exercise:
    return Exercise(
        stem.replace("_", "-"), "capstones", f"{number:02}_{stem}.py", title, f"capstones/{number:02}_{stem}"
    )


EXERCISES = (
    _dp(1, "manual_averaging", "Average the gradients of two copies by hand", "03_manual"),
    _dp(2, "replicas", "Copy the model to every device, average on the CPU", "03_manual"),
    _dp(3, "comms", "Broadcast, gather and barrier from sends and receives", "05_sync_primitives"),
    _dp(4, "naive_all_reduce", "All-reduce through rank 0", "06_all_reduce"),
    _dp(5, "ring_all_reduce", "All-reduce round the ring", "06_all_reduce"),
    _dp(6, "hierarchical_all_reduce", "All-reduce with few bytes between hosts", "06_all_reduce", name="hierarchical"),
    _dp(7, "all_to_all", "Send every token to the rank of its expert, and back", "05_sync_primitives"),
    _dp(8, "model_and_main", "Train one model on several ranks", "07_naive"),
    _dp(9, "hooks", "Average each gradient as soon as it is there", "08_hooks"),
    _dp(10, "buckets", "Send gradients in buckets, while backward still computes", "09_bucketing"),
    _dp(11, "accumulation", "Add up gradients over micro-batches, and send them once", "10_batching"),
    _dp(12, "parameter_averaging", "Average weights every few steps, with all their state", "10_batching"),
    _dp(13, "performance", "Say where the time of a step went", "11_performance"),
    Exercise(
        "read-a-hang", "data_parallel", "14_read_a_hang.py", "Say which rank of a hang is to blame", "seeing/hangs"
    ),
    _pp(1, "manual_split", "Cut a model in two and hand the gradient over", "02_manual"),
    _pp(2, "ping_pong", "Pass a tensor back and forth", "03_ping_pong"),
    _pp(3, "pipeline_comms", "Send a tensor to a neighbour that does not know its shape", "03_ping_pong"),
    _pp(4, "sharded_model", "Give every rank its own layers", "04_naive"),
    _pp(5, "naive_pipeline", "One batch through all stages and back", "04_naive"),
    _pp(6, "gpipe", "Fill the pipeline with micro-batches, then drain it", "05_gpipe"),
    _pp(7, "one_f_one_b", "One forward, one backward", "06_1f1b", name="1f1b"),
    _pp(8, "interleaved", "Several thin stages of the model on every rank", "07_interleaved"),
    _pp(9, "zero_bubble", "Split the backward and fill the gaps", "08_zero_bubble"),
    _sh(1, "ring_halves", "Reduce-scatter and all-gather round the ring", "02_two_halves"),
    _sh(2, "sharded_optimizer", "Keep the optimizer's state for your own part only", "03_each_its_part"),
    _sh(3, "zero_2", "Keep your part of the gradients while they add up", "03_each_its_part"),
    _sh(4, "sharded_linear", "Gather a layer's weight where it is used, and let it go", "04_gathered_on_demand"),
    _sh(5, "zero_3", "Gather units ahead, and keep few of them whole", "04_gathered_on_demand"),
    _fb(1, "loss_scaling", "Scale the loss, and skip a step on all ranks together", "01_half_the_bytes"),
    _fb(2, "topk_feedback", "Send the largest gradients, and keep the rest for later", "02_send_only_what_matters"),
    _fb(3, "powersgd", "Two thin matrices instead of a gradient", "02_send_only_what_matters"),
    _sv(1, "kill_and_resume", "Die at any moment, and end with the same weights", "01_what_if_a_rank_dies"),
    _cap(1, "trainer", "A data-parallel trainer that survives a kill"),
    _cap(2, "gpt_pipeline", "A pipeline for a small GPT, within a limit of memory"),
    _cap(3, "beat_1f1b", "A schedule that beats 1F1B on an uneven machine"),
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
