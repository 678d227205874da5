"""What fewer bytes cost in accuracy: digits and text, every method, five seeds, with and without error feedback.

    python benchmarks/fewer_bytes.py                    # a table for digits (SGD, AdamW) and one for text (AdamW)
    python benchmarks/fewer_bytes.py --seeds 2 --only digits

Each run is `microparallel train --ranks 2` with the seed in question; shown is the mean over the seeds of what was held
back, with the smallest and the largest. Beside it stands what a rank sends in a step, as a share of what plain float32
sends.
"""

import argparse
import math
import statistics
from dataclasses import dataclass, replace

import microparallel as mp
from microparallel.comms.record import Recorder
from microparallel.train.build import build
from microparallel.train.config import TrainConfig

METHODS = ("bf16", "fp16", "int8", "sign", "topk:0.1", "topk:0.01", "randomk:0.1", "powersgd:2", "topk:0.01+bf16")
DIGITS = TrainConfig(model="mlp", depth=4, dim=128, steps=300, batch=64, schedule_lr="constant", ranks=2)
TEXT = TrainConfig(model="gpt", dim=64, depth=2, context=32, steps=300, batch=32, lr=1e-3, ranks=2)
JOBS = {
    "digits, SGD": replace(DIGITS, optimizer="sgd", lr=0.1),
    "digits, AdamW": replace(DIGITS, optimizer="adamw", lr=1e-3),
    "text, AdamW": replace(TEXT, optimizer="adamw"),
}


@dataclass(frozen=True)
class Outcome:
    """What came of one run: loss and accuracy on what was held back, and the bytes a rank sent in the last step."""

    loss: float
    accuracy: float | None
    sent: float


def run(comms: mp.Comms, config: TrainConfig) -> Outcome:
    """One rank's part in a run; every rank returns the same."""
    training = build(config, comms)
    for _ in range((config.steps or 0) - 1):
        training.step()
    recorder = Recorder(comms, memory=False)
    recorder.start()
    training.step()
    recorder.stop()
    trace = recorder.gather({})
    found = training.validate()
    assert found is not None
    record = found.record
    return Outcome(record["validation_loss"], record.get("validation_accuracy"), max(trace.bytes_sent))


def rows(precisions: bool) -> dict[str, dict[str, object]]:
    """The settings of each row."""
    found: dict[str, dict[str, object]] = {"float32": {}}
    if precisions:
        found |= {f"precision {name}": {"precision": name} for name in ("bf16", "fp16")}
    for method in METHODS:
        found[f"compress {method}"] = {"compress": method}
        found[f"compress {method}, no feedback"] = {"compress": method, "no_feedback": True}
    return found


def main() -> None:
    """Print a table for each job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="jobs whose names have this in them")
    parser.add_argument("--steps", type=int, default=None)
    arguments = parser.parse_args()
    with mp.Pool() as pool:
        for name, job in JOBS.items():
            if arguments.only not in name:
                continue
            print(f"\n{name}: {job.steps} steps of {job.batch} samples, 2 ranks, {arguments.seeds} seeds")
            print(f"{'':40} {'loss':>7} {'from':>7} {'to':>7}  {'accuracy':>8} {'from':>6} {'to':>6}  {'sent':>6}")
            whole = math.nan
            for label, options in rows(True).items():
                config = replace(job, steps=arguments.steps or job.steps, **options).resolved()
                each = [pool.run(run, 2, replace(config, seed=seed))[0] for seed in range(arguments.seeds)]
                whole = each[0].sent if math.isnan(whole) else whole
                print(f"{label:40} {_spread([one.loss for one in each], 7, 3)}", end="  ")
                known = [100 * one.accuracy for one in each if one.accuracy is not None]
                print(_spread(known, 6, 1) if known else f"{'–':>20}", f" {each[0].sent / whole:6.3f}", flush=True)


def _spread(numbers: list[float], width: int, digits: int) -> str:
    three = statistics.fmean(numbers), min(numbers), max(numbers)
    return " ".join(f"{number:{width}.{digits}f}" for number in three)


if __name__ == "__main__":
    main()
