from answers import Answer

WEIGHT = " * (len(inputs) / len(batch))  # this rank's part of the mean\n"
REDUCE = "    row = comms.all_reduce(row)\n"
SHARE = "batch[comms.rank :: comms.world_size]"
BROADCAST = "        for parameter in job.model.parameters():\n            comms.broadcast(parameter.data, 0)\n"
SEED = "manual_seed(epoch)"
PLACE = "    epoch, place = divmod(step, -(-samples // size))\n"
ZERO = "    job.optimizer.zero_grad()\n"
STEP = "        job.optimizer.step()\n"
SAVE = "        if done % job.save_every == 0:\n            save(comms, job, done)\n"
REPORT = "        job.report(done, loss)\n"
ASIDE = '        aside = job.folder / "checkpoint.writing"\n'
SYNC = "            file.flush()\n            os.fsync(file.fileno())\n"
REPLACE = '        aside.replace(job.folder / "checkpoint.pt")\n'
LOAD_OPTIMIZER = '    job.optimizer.load_state_dict(state["optimizer"])\n'
LOAD_MODEL = '    job.model.load_state_dict(state["model"])\n'
DONE = '    return state["done"]\n'

ANSWERS = [
    Answer(
        "the library's own DataParallel",
        {"    done = restore(comms, job)\n": "    mp.DataParallel(job.model, comms)\n    done = restore(comms, job)\n"},
        "calls microparallel.data_parallel.wrapper.DataParallel: the point is to write it yourself",
    ),
    Answer(
        "the library's own sampler",
        {"    done = restore": "    mp.ShardedSampler(24, 10, comms=comms)\n    done = restore"},
        "calls microparallel.train.sampler.ShardedSampler: the point is to write it yourself",
    ),
    Answer(
        "every rank counts the same",
        {WEIGHT: " / comms.world_size\n"},
        "every rank counts the same, but their shares have different numbers of samples",
        quick=True,
    ),
    Answer("added up", {WEIGHT: "\n"}, "the ranks' gradients are added up, and each is that of a mean"),
    Answer(
        "nothing is averaged",
        {WEIGHT: "\n", REDUCE: ""},
        "rank 0 has learned from its own samples alone: average the gradients",
    ),
    Answer("every rank begins with its own weights", {BROADCAST: ""}, "rank 1 has begun with its own weights"),
    Answer(
        "the loss of its own share is reported",
        {"    return row[0].item()\n": "    return loss.item() * len(batch) / len(inputs)\n"},
        "it is the loss of its own share",
    ),
    Answer("shares that are not alike", {SHARE: "batch[4 * comms.rank :][:4]"}, "shares differ by one at most"),
    Answer(
        "the last batch is left out", {PLACE: PLACE.replace("-(-samples // size)", "samples // size")}, "not used ["
    ),
    Answer("never shuffled anew", {SEED: "manual_seed(0)"}, "shuffle anew in each epoch"),
    Answer(
        "every rank shuffles for itself",
        {
            SEED: "manual_seed(epoch + 1000 * RANK)",
            "    batch = batch_of": "    global RANK\n        RANK = comms.rank\n        batch = batch_of",
        },
        "used more than once",
    ),
    Answer(
        "every rank computes the whole batch",
        {
            f"    inputs, targets = job.data({SHARE})\n": f"    mine = job.data({SHARE})\n"
            "    inputs, targets = (torch.cat([one.repeat(3, 1)])[: len(batch)] for one in mine)\n"
        },
        "the ranks share the work, and what they tell each other are gradients",
    ),
    Answer("optimizer state forgotten", {LOAD_OPTIMIZER: ""}, "the optimizer's state is forgotten"),
    Answer("weights forgotten", {LOAD_MODEL: ""}, "the weights are forgotten: the model begins anew"),
    Answer(
        "sampler begins anew",
        {
            "    done = restore(comms, job)\n": "    begun = done = restore(comms, job)\n",
            "batch_of(done,": "batch_of(done - begun,",
        },
        "the place in the epoch is forgotten",
    ),
    Answer("steps forgotten", {DONE: "    return 0\n"}, "the number of steps is forgotten: it counts from 1 again"),
    Answer("step counted twice", {DONE: '    return state["done"] - 1\n'}, "step 4 is done twice"),
    Answer(
        "saved before the update",
        {STEP: "", REPORT: "", SAVE: "        job.report(done, loss)\n" + SAVE + STEP},
        "before optimizer.step(), and counts this step as done",
    ),
    Answer("written in place", {ASIDE: ASIDE.replace("writing", "pt"), REPLACE: ""}, "the file is written in place"),
    Answer("no fsync", {SYNC: ""}, "of checkpoint.pt there is the name and no bytes"),
    Answer(
        "the old one is deleted first",
        {ASIDE: ASIDE + '        (job.folder / "checkpoint.pt").unlink(missing_ok=True)\n'},
        "the old checkpoint is deleted before the new one is complete",
    ),
    Answer("nothing is saved", {SAVE: ""}, "there is no file in the folder"),
    Answer(
        "gradients of all steps",
        {ZERO: ""},
        "the gradients of all steps so far are added up: torch adds to .grad",
    ),
    Answer(
        "every rank asks for the whole batch",
        {SHARE: "batch", WEIGHT: " / comms.world_size\n"},
        "all 3 ranks ask for the same samples in step 1: each takes a share of the batch, and no two the same sample",
    ),
    Answer(
        "the loss goes through float32",
        {"    return row[0].item()\n": "    return torch.tensor(row[0].item()).item()\n"},
        "it is right to six digits only, so somewhere there is float32",
    ),
    Answer(
        "the checkpoint is not read",
        {
            "    done = restore(comms, job)\n": "    done = 0\n"
            + BROADCAST.replace("        ", "    ", 1).replace("            comms", "        comms")
        },
        "save after every 4 steps, and begin train with the newest checkpoint",
    ),
    Answer(
        "every rank writes",
        {"    if comms.rank == 0:\n": "    if True:\n"},
        "several ranks write the same file: let one of them write it",
    ),
    Answer(
        "only its own part of the loss is reported",
        {"    return row[0].item()\n": "    return loss.item()\n"},
        "it is its own share's part of it, and all ranks' parts add up to it",
    ),
    Answer(
        "gradients go through float32",
        {REDUCE: "    row = comms.all_reduce(row.float()).double()\n"},
        "weights are right to six digits only",
    ),
    Answer(
        "nobody waits for the one that writes",
        {"    comms.barrier()  # nobody is a step ahead of what can be restored\n": ""},
        "already: all ranks wait until the checkpoint of step",
    ),
]
