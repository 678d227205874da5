"""Beat 1F1B: a schedule for a machine that is not even. You write this file; here is its contract.

    def schedule(ranks: int, microbatches: int, costs: mp.Costs, most: Sequence[int])
        -> mp.Program

Return the program of one training step that takes less time on this machine than 1F1B does.

  - `ranks`: how many ranks there are, at least 2. The model is cut into as many stages, and
    stage s is on rank s.
  - `microbatches`: how many there are, at least 2. Each has its forward and its backward once on
    every stage.
  - `costs`: how long everything takes, as `mp.simulate` reads it. Stages differ, and links
    differ. `costs.of(op)` says how long an operation computes, `costs.link(sender,
    receiver).latency` how long a message takes.
  - `most`: of each rank, the most activations that it may hold at once. 1F1B always keeps to
    that.
  - What to return: `Program(name, TrainingStep(ranks, microbatches), rows)`, with a tuple of
    operations for each rank, all from `microparallel.program`: Forward(stage, microbatch), and
    then Backward, or its two halves BackwardInput and BackwardWeight. Messages may be left out:
    they are added. The program's text (`mp.program.to_text`) will do, too.

Your function may simulate and search (`mp.simulate`, `mp.verify`), for 6 seconds a machine; of
`mp.schedules` nothing may be called. It is judged on machines that are not shown. It passes if
it beats 1F1B on all of them, which is one star; two stars are for at most 5 % more than the best
known on every machine, and three for at most 1 %.

Lesson: docs/capstones/03_beat_1f1b.md          Check it: microparallel learn check beat-1f1b
"""
