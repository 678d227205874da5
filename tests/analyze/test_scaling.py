"""Scaling: worlds of several sizes really run, and what is made of their times."""

import xml.etree.ElementTree as ElementTree

import pytest
import torch

import microparallel as mp
from microparallel.analyze.scaling import (
    Scaling,
    ScalingPoint,
    measure_scaling,
    plot_scaling,
    rank_counts,
    scaling_bars,
)
from microparallel.errors import UsageError


def scaling(kind="strong", cores=8, device="cpu", times=((1, 64, 8.0), (2, 64, 4.0), (4, 64, 4.0))):
    points = tuple(ScalingPoint(ranks, batch, (seconds,)) for ranks, batch, seconds in times)
    return Scaling(kind, points, cores, device, 1)


def test_worlds_to_try():
    assert [rank_counts(most) for most in (1, 2, 4, 6)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 6]]


def test_strong_scaling_compares_the_time_of_the_same_batch():
    found = scaling()
    assert [found.speedup(point) for point in found.points] == [1, 2, 2]
    assert [found.efficiency(point) for point in found.points] == [1, 1, 0.5]


def test_weak_scaling_compares_samples_a_second():
    found = scaling("weak", times=((1, 32, 2.0), (2, 64, 2.0), (4, 128, 4.0)))
    assert [found.speedup(point) for point in found.points] == [1, 2, 2]
    assert [found.efficiency(point) for point in found.points] == [1, 1, 0.5]


def test_it_says_so_where_ranks_outnumber_the_cores():
    assert scaling(cores=4).remark is None
    assert scaling(cores=2, device="cuda").remark is None
    remark = scaling(cores=2).remark
    assert "2 cores" in remark and "from 4 ranks on" in remark and "beyond 2" in remark


def test_bars_stand_beside_the_ideal():
    assert scaling_bars(scaling()).splitlines() == [
        "1 rank   ████████                          1.00 of 1",
        "2 ranks  ████████████████                  2.00 of 2",
        "4 ranks  ████████████████················  2.00 of 4",
    ]


def test_the_plot_is_a_picture_with_a_line_for_each_kind():
    svg = plot_scaling([scaling(), scaling("weak")], "made up")
    ElementTree.fromstring(svg)
    assert "strong scaling" in svg and "weak scaling" in svg and "made up" in svg
    assert "more ranks than cores" not in svg
    assert "more ranks than cores" in plot_scaling([scaling(cores=2)])


def make_step(comms, batch):
    model = mp.DataParallel(torch.nn.Linear(4, 2), comms)
    inputs = torch.randn(batch // comms.world_size, 4)

    def step():
        assert torch.get_num_threads() >= 1
        model(inputs).sum().backward()

    return step


@pytest.mark.parametrize("kind", ["strong", "weak"])
def test_real_ranks_are_run(pool, kind):
    told = []
    found = measure_scaling(
        pool, make_step, kind, [1, 2, 4], 8, steps=3, transport="gloo", device="cpu", progress=told.append
    )
    assert told == [1, 2, 4] == [point.ranks for point in found.points]
    assert [point.batch for point in found.points] == ([8, 8, 8] if kind == "strong" else [8, 16, 32])
    assert all(len(point.seconds) == 3 and min(point.seconds) > 0 for point in found.points)
    assert found.device == "cpu" and found.speedup(found.points[0]) == 1


@pytest.mark.parametrize("counts", [[], [2, 1], [0, 1], [1, 1]])
def test_counts_that_mean_nothing_are_refused(counts):
    with pytest.raises(UsageError, match="from few to many"):
        measure_scaling(None, make_step, "strong", counts, 8)
