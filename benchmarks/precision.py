"""Does a model learn in 16 bits what it learns in float32? The digits MLP and a small GPT, with several seeds each.

    python benchmarks/precision.py
    python benchmarks/precision.py --subjects digits-16 --seeds 12

Each run is one of `microparallel train` on 2 ranks: parameters are float32, and layers compute with 16-bit copies. For
each precision the table has the mean over the seeds, the lowest and the highest, and the mean's distance to float32's;
for float16, the steps that were skipped, and the scale of the loss at the end.
"""

import statistics
from typing import Annotated, Any

import torch
import typer

import microparallel as mp
from microparallel.train.build import build
from microparallel.train.config import TrainConfig

PRECISIONS = ("float32", "bf16", "fp16")
SUBJECTS: dict[str, dict[str, Any]] = {
    "digits": {"model": "mlp", "depth": 4},
    "digits-16": {"model": "mlp", "depth": 16},  # what `microparallel train` trains unless something else is said
    "text": {"model": "gpt", "dim": 64, "depth": 2, "heads": 2, "context": 32, "batch": 16},
}


def learn(comms: mp.Comms, config: TrainConfig) -> dict[str, float]:
    """All steps of a run, and what is measured at its end."""
    training = build(config, comms)
    while training.steps_done < training.total_steps:
        training.step()
    found = training.validate()
    assert found is not None and found.loss is not None and found.accuracy is not None
    scale = training.loss_scale
    return {
        "loss": found.loss,
        "accuracy": 100 * found.accuracy,
        "steps": training.steps_done,
        "skipped": scale.skipped if scale else 0,
        "scale": scale.value if scale else 0.0,
    }


def table(subject: str, found: dict[str, list[dict[str, float]]]) -> str:
    """A row for each precision."""
    what, form = ("loss", ".4f") if subject == "text" else ("accuracy", ".2f")
    reference = statistics.mean(run[what] for run in found["float32"])
    unit = "points" if what == "accuracy" else "%"
    lines = [
        f"{'':8}  {'validation ' + what:>20}  {'lowest':>8}  {'highest':>8}  {'− float32':>14}  skipped  last scale"
    ]
    for precision, runs in found.items():
        values = [run[what] for run in runs]
        mean = statistics.mean(values)
        apart = mean - reference if what == "accuracy" else 100 * (mean / reference - 1)
        row = f"{precision:8}  {mean:20{form}}  {min(values):8{form}}  {max(values):8{form}}  {apart:+7.2f} {unit:6}"
        if precision == "fp16":
            scales = sorted({f"{run['scale']:,.0f}" for run in runs})
            row += f"  {statistics.mean(run['skipped'] for run in runs):7.1f}  {', '.join(scales)}"
        lines.append(row)
    return "\n".join(lines)


def main(
    seeds: Annotated[int, typer.Option(help="Runs of each.")] = 5,
    subjects: Annotated[str, typer.Option(help="Which, with commas between them.")] = "digits,text",
    ranks: int = 2,
    steps: Annotated[int | None, typer.Option(help="Of each run; otherwise what the models take.")] = None,
) -> None:
    """Train, and print a table for each model."""
    with mp.Pool() as pool:
        for subject in subjects.split(","):
            settings = SUBJECTS[subject]
            found: dict[str, list[dict[str, float]]] = {}
            for precision in PRECISIONS:
                configs = [
                    TrainConfig(**settings, steps=steps, ranks=ranks, precision=precision, seed=seed).resolved()
                    for seed in range(seeds)
                ]
                found[precision] = [pool.run(learn, ranks, config)[0] for config in configs]
            done = int(found["float32"][0]["steps"])
            of = ", ".join(f"{name} {value}" for name, value in settings.items())
            print(f"{subject}: {of}; {done} steps, {seeds} seeds, {ranks} ranks; torch {torch.__version__}\n")
            print(table(subject, found), end="\n\n", flush=True)


if __name__ == "__main__":
    typer.run(main)
