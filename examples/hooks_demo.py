"""Hooks let gradients travel while backward still computes: when does each leave, and when is it back?

Question   Backward makes one gradient after another, and nobody needs them before the optimizer
           steps. How much of their journey can computation hide?
Look at    the dots: a gradient is ready, the last layer's first. By hand, all of them wait for the
           end of backward (a long line, then a light bar: nobody computes). With hooks they leave
           at once, behind computation (a dark bar); in buckets there are few journeys instead of
           many. The network is played slower than your machine: every message takes --link ms
           longer.
Try        python examples/hooks_demo.py --link 0       your machine as it is
           python examples/hooks_demo.py --bucket 100   one bucket for all: what is hidden?
           python examples/hooks_demo.py --bucket 0.1   a bucket for every layer
           and let --link grow until computation is too short to hide it
"""

import argparse
import math
import sys
from pathlib import Path

import torch

import microparallel as mp
from microparallel.broken_pipe import quiet_broken_pipe


def show(comms: mp.Comms, options: argparse.Namespace) -> dict[str, mp.Trace]:
    """Every rank runs this; rank 0 prints."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a core for each rank
    model = mp.models.FullMLP(options.width, depth=options.depth)
    inputs = torch.randn(options.batch, options.width)
    mp.course.demonstrate_hook_order(model, comms, inputs)
    if comms.rank == 0:
        print()
    link = {"bucket_size_mb": options.bucket, "link_seconds": options.link / 1e3}
    traces = mp.course.demonstrate_overlap(model, comms, inputs, **link, steps=options.steps)
    if comms.rank == 0:
        print("\nthe same without a tracker, whole steps against no synchronisation at all:")
    mp.course.compare_hook_timing(model, comms, inputs, **link, steps=options.steps)
    return traces


@quiet_broken_pipe()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256, help="of each layer (default 256)")
    parser.add_argument("--depth", type=int, default=8, help="layers (default 8)")
    parser.add_argument("--batch", type=int, default=256, help="samples of each rank (default 256)")
    parser.add_argument("--bucket", type=float, default=0.5, help="MiB of gradients in a bucket (default 0.5)")
    parser.add_argument("--link", type=float, default=1.0, help="ms that every message takes longer (default 1)")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each kind (default 5)")
    parser.add_argument("--svg", type=Path, help="a folder for the drawings of all ranks, as figures")
    options = parser.parse_args()
    if min(options.width, options.depth, options.batch, options.steps) < 1 or not options.bucket > 0:
        parser.error("--width, --depth, --batch and --steps must be at least 1, and --bucket above 0")
    if not (math.isfinite(options.link) and options.link >= 0):
        parser.error("--link must be at least 0")

    try:
        traces = mp.launch(show, 2, options, device="cpu", timeout=120)[0]
    except (mp.errors.RankFailed, mp.errors.RanksTimedOut) as failure:
        sys.exit(getattr(failure, "refusal", None) or str(failure))
    if options.svg is not None:
        options.svg.mkdir(parents=True, exist_ok=True)
        for way, trace in traces.items():
            (options.svg / f"{way}.svg").write_text(mp.course.draw_overlap(trace, "svg", seconds=True))
    if traces["manual"].hidden_share > 0 or traces["hooks"].hidden_share == 0:
        sys.exit("\nby hand nothing can be hidden, and with hooks something should be: is the machine busy?")
    exposed = {way: 1e3 * max(trace.exposed_communication) for way, trace in traces.items()}
    buckets = len(traces["buckets"].program.all_reduces())
    print(f"\nconclusion: communication that no computation hides: {exposed['manual']:.1f} ms by hand,")
    print(f"            {exposed['hooks']:.1f} ms with a hook for every gradient,", end=" ")
    print(f"{exposed['buckets']:.1f} ms in {buckets} bucket{'s' * (buckets > 1)}")


if __name__ == "__main__":
    main()
