"""Import the whole pure half, build three programs, and let every reader read them: a script for any Python.

`test_pure_half.py` runs it in a CPython with nothing installed, `test_web_assembly.py` in a WebAssembly Python.
"""

import importlib
import json
import pkgutil
import sys
import tempfile
import tomllib
from pathlib import Path

import microparallel as mp
from microparallel.program import from_text, to_text

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
CONTRACTS = {contract["name"]: contract for contract in PROJECT["tool"]["importlinter"]["contracts"]}
PURE = CONTRACTS["The pure half knows neither torch nor numpy"]["source_modules"]

# No round numbers: their sums show a difference in the last bit. The link is slower than the others.
COSTS = mp.Costs(
    forward=1 / 3,
    backward_input=0.7,
    backward_weight=0.1,
    optimizer=0.3,
    latency=1e-3,
    seconds_per_byte=0.017,
    add_seconds_per_byte=0.003,
    bytes_per_value=3,
    links={(2, 3): mp.Link(latency=0.05)},
)


def import_the_pure_half():
    for name in PURE:
        module = importlib.import_module(name)
        for inner in pkgutil.walk_packages(getattr(module, "__path__", []), f"{name}."):
            importlib.import_module(inner.name)


def programs():
    return {
        "ring": mp.collectives.build("ring", ranks=4),
        "1f1b": mp.schedules.build("1f1b", ranks=4, microbatches=8),
        "ddp": mp.schedules.build("ddp", ranks=4),
    }


def verdict(program, sends):
    """What the verifier says: nothing, or an error that draws the place."""
    try:
        mp.verify(program, sends=sends)
    except mp.errors.ProgramError as error:
        return str(error)
    return "right"


def chrome(trace):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.to_chrome(path)
        return path.read_text(encoding="utf-8")


def readings(program):
    """What each reader says of a program, as texts that can be compared byte for byte."""
    trace = mp.simulate(program, COSTS)
    metrics = ("makespan", "bubble_fraction", "peak_activations", "bytes_sent", "exposed_communication", "waiting")
    return {
        "program": to_text(program),
        "program read back is the same": repr(from_text(to_text(program)) == program),
        **{f"verified, {sends} sends": verdict(program, sends) for sends in ("buffered", "rendezvous", "blocking")},
        "simulated": trace.to_json(),
        "simulated, for Chrome": chrome(trace),
        **{f"simulated, {metric}": repr(getattr(trace, metric)) for metric in metrics},
        **{f"program as {form}": mp.draw(program, as_=form) for form in ("text", "svg", "html")},
        **{f"trace as {form}": mp.draw(trace, as_=form) for form in ("text", "svg", "html")},
    }


def story():
    """All readings as one text in JSON, with the system they were made on and the modules that were needed for them."""
    told = {name: readings(program) for name, program in programs().items()}
    needed = sorted(name for name in sys.modules if name.partition(".")[0] == "microparallel")
    import_the_pure_half()
    return json.dumps({"platform": sys.platform, "needed": needed, "pure": PURE, "readings": told})


if __name__ == "__main__":
    print(story())
