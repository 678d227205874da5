from answers import Answer

MODEL = '        "model": training.model.state_dict(),\n'
DONE = '        "done": training.done,\n'
GATHER = '        "random": comms.all_gather(torch.get_rng_state()),  # of each rank\n'
ONLY_RANK_0 = "    if comms.rank == 0:\n        aside"
ASIDE = '        aside = folder / "checkpoint.writing"\n'
SYNC = "            file.flush()\n            os.fsync(file.fileno())  # first the bytes …\n"
REPLACE = '        aside.replace(folder / "checkpoint.pt")  # … then the name: one sees the old one or the new one\n'
NOTHING_YET = "    if not path.exists():\n        return\n"
LOAD = "    state = torch.load(path)\n"
LOAD_MODEL = '    training.model.load_state_dict(state["model"])\n'
LOAD_OPTIMIZER = '    training.optimizer.load_state_dict(state["optimizer"])\n'
LOAD_SCHEDULE = '    training.schedule.load_state_dict(state["schedule"])\n'
LOAD_ORDER = '    training.order.epoch, training.order.place = state["epoch"], state["place"]\n'
LOAD_DONE = '    training.done = state["done"]\n'
LOAD_RANDOM = '    torch.set_rng_state(state["random"][comms.rank])\n'
UPDATE = "        training.optimizer.step()\n        training.schedule.step()\n        training.done += 1\n"
SAVE = "        if training.done % save_every == 0:\n            save(training, comms, folder)\n"
REPORT = "        report(training.done, loss.item())\n"

ANSWERS = [
    Answer(
        "the library's own Checkpointer",
        {
            "    training = Training(comms, samples)\n": "    training = Training(comms, samples)\n"
            '    mp.Checkpointer(folder / "own", comms, training.model, training.optimizer).restore()\n'
        },
        "calls microparallel.train.checkpointer.Checkpointer: the point is to write it yourself",
    ),
    Answer(
        "random state forgotten",
        {LOAD_RANDOM: ""},
        "the state of the random numbers is forgotten: dropout draws other numbers",
        quick=True,
    ),
    Answer(
        "rank 0's random state for all",
        {LOAD_RANDOM: LOAD_RANDOM.replace("[comms.rank]", "[0]")},
        "all ranks go on with the random numbers of rank 0",
    ),
    Answer(
        "sampler restarted",
        {LOAD_ORDER: ""},
        "the place in the epoch is forgotten: the order of samples begins anew",
    ),
    Answer(
        "the epoch begins anew",
        {LOAD_ORDER: LOAD_ORDER.replace('state["place"]', "0")},
        "the epoch begins anew: samples that were used before the kill are used again",
    ),
    Answer(
        "the number of the epoch forgotten",
        {LOAD_ORDER: LOAD_ORDER.replace('state["epoch"]', "0")},
        "it is at the right place, but in the order of the first epoch",
    ),
    Answer(
        "optimizer state forgotten",
        {LOAD_OPTIMIZER: ""},
        "the optimizer's state is forgotten: Adam begins without its moments",
    ),
    Answer(
        "schedule restarted",
        {LOAD_SCHEDULE: ""},
        "the learning rate's schedule is forgotten: the learning rate begins where it began at step 1",
    ),
    Answer(
        "optimizer and schedule forgotten",
        {LOAD_OPTIMIZER: "", LOAD_SCHEDULE: ""},
        "the optimizer's state and the learning rate's schedule are forgotten",
    ),
    Answer("weights forgotten", {LOAD_MODEL: ""}, "the weights are forgotten: the model begins anew"),
    Answer(
        "only the number of the step",
        {LOAD_MODEL: "", LOAD_OPTIMIZER: "", LOAD_SCHEDULE: "", LOAD_ORDER: "", LOAD_RANDOM: ""},
        "nothing but the number of the step is restored",
    ),
    Answer(
        "step counted twice",
        {DONE: DONE.replace("done,", "done - 1,")},
        "step 4 is counted twice: its update is in the weights of the checkpoint",
        quick=True,
    ),
    Answer("a step left out", {DONE: DONE.replace("done,", "done + 1,")}, "step 5 is left out"),
    Answer(
        "saved before the optimizer step but counted after it",
        {
            UPDATE: "        training.done += 1\n" + SAVE + "        training.optimizer.step()\n"
            "        training.schedule.step()\n",
            REPORT + SAVE: REPORT,
        },
        "the checkpoint is that of step 4 before optimizer.step(), and counts this step as done: its update is lost",
    ),
    Answer(
        "saved before schedule.step()",
        {
            UPDATE: "        training.optimizer.step()\n        training.done += 1\n"
            + SAVE
            + "        training.schedule"
            ".step()\n",
            REPORT + SAVE: REPORT,
        },
        "the schedule is one step behind",
    ),
    Answer(
        "written in place",
        {ASIDE: '        aside = folder / "checkpoint.pt"\n', REPLACE: ""},
        "the file is written in place, so what was in it is gone before the new bytes are there",
        quick=True,
    ),
    Answer(
        "written in place, and what cannot be read is left out",
        {
            ASIDE: '        aside = folder / "checkpoint.pt"\n',
            REPLACE: "",
            LOAD: "    try:\n        state = torch.load(path)\n    except Exception:\n        return\n",
        },
        "goes on from step 0, though the checkpoint of step 12 was complete: the file is written in place",
    ),
    Answer(
        "no fsync before the rename",
        {SYNC: ""},
        "there is the name and no bytes, because nothing had brought them to the disk. Write, flush",
        quick=True,
    ),
    Answer(
        "fsync without flush",
        {
            "            torch.save(state, file)\n" + SYNC: "            import io\n"
            "            memory = io.BytesIO()\n"
            "            torch.save(state, memory)\n"
            "            for begin in range(0, memory.tell(), 1000):\n"
            "                file.write(memory.getvalue()[begin:][:1000])\n"
            "            os.fsync(file.fileno())\n"
        },
        "os.fsync was called before all was written: file.flush() comes first",
    ),
    Answer(
        "the old checkpoint is deleted first",
        {ASIDE: '        (folder / "checkpoint.pt").unlink(missing_ok=True)\n' + ASIDE},
        "the old checkpoint is deleted before the new one is complete",
    ),
    Answer(
        "the old checkpoint is moved out of the way",
        {
            REPLACE: '        if (folder / "checkpoint.pt").exists():\n'
            '            (folder / "checkpoint.pt").rename(folder / "checkpoint.old")\n' + REPLACE
        },
        "at this moment no complete checkpoint has the name that the next attempt looks for",
    ),
    Answer(
        "only rank 0 loads",
        {NOTHING_YET: "    if comms.rank > 0 or not path.exists():\n        return\n"},
        "rank 0 goes on from step 4, rank 1 goes on from step 0: every rank goes on from the same checkpoint",
    ),
    Answer(
        "rank 1 loads only the numbers",
        {
            LOAD_MODEL + LOAD_OPTIMIZER + LOAD_SCHEDULE: "    if comms.rank == 0:\n"
            + "".join(f"    {line}" for line in (LOAD_MODEL, LOAD_OPTIMIZER, LOAD_SCHEDULE)),
            LOAD_RANDOM: LOAD_RANDOM,
        },
        "only rank 0 loads",
    ),
    Answer(
        "a file for each rank, and nobody asks the other",
        {
            ONLY_RANK_0: ONLY_RANK_0.replace("if comms.rank == 0", "if True"),
            ASIDE: ASIDE.replace('"checkpoint.writing"', '("checkpoint.writing-" + str(comms.rank))'),
            REPLACE: REPLACE.replace('"checkpoint.pt"', '("checkpoint.pt" + str(comms.rank))'),
            '    path = folder / "checkpoint.pt"\n': '    path = folder / ("checkpoint.pt" + str(comms.rank))\n',
        },
        "parts of two checkpoints. A checkpoint counts only when all ranks' parts are there",
    ),
    Answer(
        "saved once, after the first steps",
        {SAVE: SAVE.replace("training.done % save_every == 0", "training.done == save_every")},
        "and the next attempt goes on from step 4, though the checkpoint of step",
    ),
    Answer(
        "a save that draws random numbers",
        {"    state = {\n" + MODEL: "    torch.rand(1)\n    state = {\n" + MODEL},
        "saving changes the training",
    ),
    Answer(
        "rank 0 saves alone",
        {SAVE: SAVE.replace("if ", "if comms.rank == 0 and ")},
        "with Mismatch",
    ),
    Answer(
        "our own atomic write",
        {
            ASIDE: ASIDE + "        from microparallel.files.atomic import write_atomically\n"
            "        write_atomically(aside, b'')\n"
        },
        "your code calls microparallel.files.atomic.write_atomically",
    ),
    Answer(
        "gradients are not averaged",
        {'            comms.all_reduce(parameter.grad, op="mean")\n': "            pass\n"},
        "without any kill, the ranks end with different weights",
    ),
    Answer(
        "an old format of torch",
        {"            torch.save(state, file)\n": "            torch.save(training, file)\n"},
        "rank 0 stopped in line",
    ),
]
