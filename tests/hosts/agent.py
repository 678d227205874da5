"""torchrun on a host of `bed.py`: `python agent.py …` is `torchrun …`.

Its ranks are forked from a process that has imported torch, if this one was: starting them anew is what takes time.
With CLOCK_AHEAD, the clock of this host is so many seconds ahead, as torchrun sees it.
"""

import os
import subprocess
import sys
from datetime import datetime, timedelta
from types import SimpleNamespace

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from microparallel.world import rank_process


def fork_rank(args, env, **_):
    """In place of `subprocess.Popen`, for `python -u -m microparallel …`."""
    words = list(args[args.index("-m") + 1 :])
    program = f"import sys; sys.argv = {words!r}; from microparallel.cli import main; main()"
    return rank_process.subprocess.Popen(["-c", program], env=env)


def wrong_clock(seconds):
    """In place of the class `datetime`, of which torchrun's rendezvous asks for the time."""
    return SimpleNamespace(now=lambda zone: datetime.now(zone) + timedelta(seconds=seconds))


if __name__ == "__main__":
    if "CLOCK_AHEAD" in os.environ:
        dynamic_rendezvous.datetime = wrong_clock(float(os.environ["CLOCK_AHEAD"]))
    if rank_process.subprocess is not subprocess:  # `commands.become` has put a fork server there
        subprocess_handler.Popen = fork_rank
    run.main(sys.argv[1:])
