"""MPS, NVIDIA's service that lets the processes which share a GPU compute at once, and not by turns.

```
launcher ── pipe ──▶ guard ── starts, adopts ──▶ control daemon ── at the first client ──▶ server
    │                                                                                        ▲
    └── starts ──▶ ranks ─────────────────────── by the folder in their environment ─────────┘
```

`choice.py` decides whether a world is to run under it, `of_ranks.py` keeps a pool's ranks and their daemon together,
`daemon.py` is the daemon as the launcher sees it. `guard.py` and `client.py` are programs in processes of their own.
"""

from microparallel.world.mps.of_ranks import MpsOfRanks

__all__ = ["MpsOfRanks"]
