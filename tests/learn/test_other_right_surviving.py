"""Ways to survive a kill that are right in another way than the solution: no grader may refuse them."""

import pytest
from answers import Answer

from microparallel.learn.catalogue import find_exercise

IMPORTS = "import os\nimport tempfile\n"
GATHERED = '        "random": comms.all_gather(torch.get_rng_state()),  # of each rank\n'
WRITE = """    if comms.rank == 0:
        aside = folder / "checkpoint.writing"
        with aside.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # first the bytes …
        aside.replace(folder / "checkpoint.pt")  # … then the name: one sees the old one or the new one
        names = os.open(folder, os.O_RDONLY)
        os.fsync(names)  # the new name is on the disk, too
        os.close(names)
"""
PATH = '    path = folder / "checkpoint.pt"\n    if not path.exists():\n        return\n'
LOAD = "    state = torch.load(path)\n"
RANDOM = '    torch.set_rng_state(state["random"][comms.rank])\n'
UPDATE = "        training.optimizer.step()\n        training.schedule.step()\n        training.done += 1\n"
REPORT = "        report(training.done, loss.item())\n"
SAVE = "        if training.done % save_every == 0:\n            save(training, comms, folder)\n"
BATCH = "        batch = training.order.draw(BATCH * comms.world_size)\n"

A_FILE_FOR_EACH_RANK = {
    GATHERED: '        "random": torch.get_rng_state(),\n',
    WRITE: """    aside = folder / f"writing-{comms.rank}"
    with open(aside, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file)
    os.rename(aside, folder / f"{training.done:06}-{comms.rank}")
    comms.barrier()  # now all ranks have theirs
    for old in sorted(folder.glob(f"[0-9]*-{comms.rank}"))[:-2]:
        os.remove(old)
""",
    PATH + LOAD: """    ranks = range(comms.world_size)
    everybody = set.intersection(*({int(one.name[:6]) for one in folder.glob(f"[0-9]*-{rank}")} for rank in ranks))
    comms.barrier()
    if not everybody:
        return
    for path in folder.glob(f"[0-9]*-{comms.rank}"):
        if int(path.name[:6]) > max(everybody):
            path.unlink()
    state = torch.load(folder / f"{max(everybody):06}-{comms.rank}")
""",
    RANDOM: '    torch.set_rng_state(state["random"])\n',
}
A_FOLDER_WITH_A_MANIFEST = {
    IMPORTS: "import json\nimport os\nimport shutil\nimport tempfile\n",
    WRITE: """    if comms.rank == 0:
        new = folder / f"step-{training.done}.writing"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        torch.save(state, str(new / "state.pt"))  # by C++, which tells Python nothing
        (new / "manifest.json").write_text(json.dumps({"done": training.done}))
        for one in (new / "state.pt", new / "manifest.json", new):
            handle = os.open(one, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
        new.rename(folder / f"step-{training.done}")
        olds = sorted(folder.glob("step-*[0-9]"), key=lambda one: int(one.name[5:]))[:-1]
        for old in olds:
            shutil.rmtree(old)
""",
    PATH + LOAD: """    whole = []
    for path in folder.glob("step-*[0-9]"):
        if (path / "manifest.json").exists():
            whole.append((json.loads((path / "manifest.json").read_text())["done"], path))
    if not whole:
        return
    try:
        state = torch.load(max(whole)[1] / "state.pt")
    except FileNotFoundError:  # killed while it was being removed, which is done to old ones
        raise AssertionError(sorted(whole))
""",
}
SAFETENSORS = {
    IMPORTS: "import json\nimport os\nimport tempfile\n\nfrom safetensors.torch import load_file, save_file\n",
    WRITE: """    if comms.rank == 0:
        moments = state["optimizer"]["state"]
        tensors = {f"model.{name}": one for name, one in state["model"].items()}
        tensors |= {f"adam.{at}.{name}": one for at, few in moments.items() for name, one in few.items()}
        tensors |= {f"random.{rank}": one for rank, one in enumerate(state["random"])}
        rest = [state["schedule"], state["optimizer"]["param_groups"], state["epoch"], state["place"], state["done"]]
        aside = tempfile.mkstemp(dir=folder)
        os.close(aside[0])
        save_file(tensors, aside[1], {"rest": json.dumps(rest)})
        os.sync()
        os.replace(aside[1], folder / "newest.safetensors")
""",
    PATH + LOAD: """    path = folder / "newest.safetensors"
    if not path.exists():
        return
    tensors = load_file(path)
    size = int.from_bytes(path.read_bytes()[:8], "little")
    rest = json.loads(json.loads(path.read_bytes()[8:][:size])["__metadata__"]["rest"])
    state = dict(zip(("schedule", "groups", "epoch", "place", "done"), rest))
    state["model"] = {name[6:]: one for name, one in tensors.items() if name.startswith("model.")}
    moments = {}
    for name, one in tensors.items():
        if name.startswith("adam."):
            moments.setdefault(int(name.split(".")[1]), {})[name.split(".")[2]] = one
    state["optimizer"] = {"state": moments, "param_groups": state["groups"]}
    state["random"] = [tensors[f"random.{rank}"] for rank in range(comms.world_size)]
""",
}

RIGHT = {
    "kill-and-resume": {
        "a file for each rank, and the newest that all of them have": A_FILE_FOR_EACH_RANK,
        "a folder with a manifest, renamed as a whole": A_FOLDER_WITH_A_MANIFEST,
        "safetensors, and all of the system's files are synced": SAFETENSORS,
        "random numbers that are a function of the step": {
            GATHERED: "",
            RANDOM: "",
            BATCH: "        torch.manual_seed(1000 * training.done + comms.rank)\n" + BATCH,
        },
        "saves after every step, and before it reports": {
            REPORT + SAVE: "        if training.done % 1 == 0:\n            save(training, comms, folder)\n" + REPORT
        },
        "two files in turn, and a word that says which": {
            WRITE: """    if comms.rank == 0:
        name = f"state-{training.done // 4 % 2}"
        for target, what in ((name, state), ("newest", name)):
            with open(folder / f"{target}.new", "wb") as file:
                torch.save(what, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(folder / f"{target}.new", folder / target)
    comms.barrier()
""",
            PATH + LOAD: """    newest = folder / "newest"
    if not newest.exists():
        return
    state = torch.load(folder / torch.load(newest))
""",
        },
        "rank 0 reads, and sends the bytes to all": {
            IMPORTS: "import io\nimport os\nimport tempfile\n",
            PATH + LOAD: """    path = folder / "checkpoint.pt"
    size = torch.tensor([path.stat().st_size if comms.rank == 0 and path.exists() else 0])
    comms.broadcast(size, 0)
    if not size.item():
        return
    row = torch.zeros(size.item(), dtype=torch.uint8)
    if comms.rank == 0:
        row = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    comms.broadcast(row, 0)
    state = torch.load(io.BytesIO(row.numpy().tobytes()))
""",
        },
    }
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), [(name, form) for name, forms in RIGHT.items() for form in forms])
def test_another_form_passes(judge, name, form):
    exercise = find_exercise(name)
    verdict = judge(exercise, Answer(form, RIGHT[name][form], "").of(exercise))
    assert verdict.passed, verdict.message
