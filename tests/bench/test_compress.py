"""A small benchmark of compressed gradients on real ranks, and what is made of its numbers."""

import dataclasses
import math

import pytest
import torch

from microparallel.bench.compress import (
    Learned,
    Measurements,
    OnLink,
    Replica,
    Result,
    Timing,
    Wires,
    bench_compress,
    compressor_of,
)
from microparallel.bench.compress_report import describe_link, report_on
from microparallel.bench.engine import transport_of
from microparallel.bench.settings import COMPRESSED, CompressSettings, injected_link
from microparallel.bench.subjects import find_subject
from microparallel.comms.message_group import count_messages
from microparallel.errors import ConfigError, UsageError
from microparallel.simulator.fitted import fit_step
from microparallel.simulator.over_links import link_seconds
from microparallel.topology import Link

SOME = ("bf16", "int8", "topk:0.01", "powersgd:2")
SMALL = CompressSettings(
    models=("mlp-64",), methods=SOME, batch=4, steps=2, train_steps=3, links=("transport", "gloo", "1gbit")
)


def bench(comms, settings):
    told = []
    measurements = bench_compress(comms, settings, lambda *news: told.append(news))
    return transport_of(comms), measurements, told


def test_every_method_is_measured_over_every_link_on_all_ranks_alike(any_pool):
    require_all_measured(any_pool, 2, SMALL)


@pytest.mark.slow
def test_three_ranks(pool):
    require_all_measured(pool, 3, dataclasses.replace(SMALL, links=("transport", "1gbit")))


def require_all_measured(pool, ranks, settings):
    (transport, first, told), *others = pool.run(bench, ranks, settings, timeout=50)
    methods = ["none", *settings.methods, "none, again"]
    assert all(other[:2] == (transport, first) for other in others)
    assert first.wrong is None
    [result] = first.results
    assert [one.method for one in result.learned] == methods
    links = [name for name in settings.links if (name, transport) != ("gloo", "gloo")]  # not beside itself
    assert [(one.link, one.method) for one in result.timings] == [(link, name) for link in links for name in methods]
    for one in result.timings:
        assert len(one.seconds) == 2 and min(one.seconds) > 0
        assert (one.predicted is None) == (one.link in ("transport", "gloo"))
        assert one.predicted is None or (math.isfinite(one.predicted) and one.predicted > 0)
    learned = {one.method: one for one in result.learned}
    assert learned["none"] == dataclasses.replace(learned["none, again"], method="none")  # the same bits
    for one in learned.values():  # but for counts of gradients, and padding
        assert one.sent == pytest.approx(one.sent_by_formula, abs=3000, rel=0.01)
        assert math.isfinite(one.loss)
    size = result.gradient_bytes
    assert learned["none"].sent_by_formula == 2 * (ranks - 1) / ranks * size
    assert learned["topk:0.01"].sent < learned["int8"].sent < learned["none"].sent
    assert told[0][:2] == (0, "mlp-64 learning by none") and told[-1][0] == pytest.approx(1)


def learn(comms, methods, steps):
    settings = dataclasses.replace(SMALL, methods=methods, train_steps=steps, links=("transport",), batch=16, steps=1)
    [result] = bench_compress(comms, settings).results
    return result.loss_at_first, {one.method: one.loss for one in result.learned}


def test_there_is_something_to_learn_and_methods_learn_it(pool):
    at_first, losses = pool.run(learn, 2, ("bf16", "topk:0.1"), 60, timeout=50)[0]
    assert losses["none"] < 0.5 * at_first
    assert losses["bf16"] == pytest.approx(losses["none"], abs=0.05)
    assert losses["bf16"] != losses["none"] != losses["topk:0.1"]
    assert losses["topk:0.1"] < 0.8 * at_first


def simulated_and_counted(comms):
    """For each method: the bytes of a recorded step's programs, and those of its messages."""
    subject, found = find_subject("mlp-64", 4, learnable=True), {}
    for method in ("none", *COMPRESSED):
        wires, (counted, counts) = Wires(comms), count_messages(comms)
        replica, other = (
            Replica(method, subject.model(), subject.on_rank(comms.rank), each) for each in (wires.comms, counted)
        )
        for _ in range(2):
            replica.step()
            other.step()
        trace, _ = replica.recorded(wires.comms)
        before = counts.bytes_sent
        other.step()
        by_programs = link_seconds(fit_step(trace), Link(0.0, 1.0), comms.transport_name)
        mine = [seconds for (rank, _), seconds in by_programs.items() if rank == comms.rank]
        found[method] = sum(mine), counts.bytes_sent - before
    return found


def test_what_is_simulated_is_what_is_sent(pool):
    """On two ranks a link that takes a second a byte, and has no latency, takes as long as a rank sends bytes."""
    for found in pool.run(simulated_and_counted, 2, timeout=50):
        for method, (by_programs, counted) in found.items():
            assert by_programs == pytest.approx(counted, abs=16), method


def on_a_link(comms):
    """One replica, over links that change between two steps."""
    wires, subject = Wires(comms), find_subject("mlp-64", 4, learnable=True)
    replica = Replica("sign", subject.model(), subject.on_rank(comms.rank), wires.comms)
    contender = OnLink(replica, "5ms", Link(5e-3, 0.0), wires)
    replica.step()
    contender.record()
    contender.step()
    slow, _ = replica.recorded(wires.comms)
    contender.record()
    wires.comms.close()
    return [trace for trace, _ in replica.steps], slow


def test_the_same_replica_steps_with_and_without_delay(pool):
    without, slow = pool.run(on_a_link, 2, timeout=50)[0]
    ops = [sorted(str(event.op) for event in trace.by_rank[0]) for trace in (*without, slow)]
    assert len(without) == 4 and all(one == ops[0] for one in ops) and any(op.endswith(":sign") for op in ops[0])
    sums = [op for op in fit_step(slow).collectives if op in fit_step(without[0]).collectives]
    assert len(sums) >= 2  # the gradients, and which there are
    assert all(fit_step(slow).collectives[op][0] >= 5e-3 for op in sums)  # a delay is never shorter than was asked for


def bench_with_a_fault(comms):
    """Let one method's ranks train alone."""
    honest = Replica.train

    def train(self, batch):
        if self.method == "int8":
            with torch.no_grad():
                next(self.model.parameters()).add_(comms.rank)
        honest(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replica, "train", train)
        return bench_compress(comms, dataclasses.replace(SMALL, models=("mlp-64", "mlp-32")))


def test_wrong_weights_end_the_run_and_name_method_and_model(pool):
    first, second = pool.run(bench_with_a_fault, 2, timeout=50)
    assert first == second
    assert str(first.wrong) == "int8 trained mlp-64 wrongly: its ranks ended with different weights"
    assert [result.model for result in first.results] == ["mlp-64"] and first.results[0].timings == ()


# ── settings ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_links_have_names_or_a_latency_and_a_bandwidth():
    assert injected_link("transport") is injected_link("gloo") is None
    assert injected_link("100mbit") == Link(1e-3, pytest.approx(8e-8))
    assert injected_link("5ms+50Mbit") == Link(5e-3, pytest.approx(1.6e-7))
    assert injected_link("1Gbit") == Link(0.0, pytest.approx(8e-9))
    for wrong in ("100mbits", "mbit", "5parsecs"):
        with pytest.raises(ConfigError, match="--links"):
            injected_link(wrong)


def test_methods_are_those_of_compression():
    assert compressor_of("none") is compressor_of("none, again") is None
    assert [compressor_of(name).name for name in ("topk:0.05", "int8")] == ["topk-0.05", "int8-256"]
    with pytest.raises(UsageError, match="did you mean 'topk'"):
        compressor_of("topkk:0.01")


# ── reports ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def measurements():
    learned = [Learned("none", 1000, 1000, 0.25), Learned("sign", 40, 32, math.nan), Learned("none, again", 1, 1, 0.25)]
    milliseconds = {"none": 100, "sign": 20, "none, again": 104}
    timings = [
        Timing(
            name, link, tuple(factor * time * 1e-3 for factor in (1.2, 0.5, 1, 0.9, 3)), 0.022 if predicted else None
        )
        for link, predicted in (("transport", False), ("100mbit", True))
        for name, time in milliseconds.items()
    ]
    result = Result("mlp-8", "16 layers of width 8", 4, 1000, 50, 0.7, tuple(learned), tuple(timings))
    return Measurements(2, 2, 4, "shm", "cpu", (result,))


def test_the_report_works_everything_out():
    report = report_on(measurements())
    rows = {(row.link, row.method): row for row in report.rows}
    sign = rows["100mbit", "sign"]
    assert (sign.seconds, sign.ratio_to_none) == pytest.approx((0.02, 0.2))
    assert (sign.predicted_seconds, sign.error) == pytest.approx((0.022, 0.1))
    assert rows["transport", "sign"].error is None
    assert rows["100mbit", "none, again"].ratio_to_none == pytest.approx(1.04)
    document = report.as_json()
    [model] = document["models"]
    assert [one["loss"] for one in model["methods"]] == [0.25, None, 0.25]  # JSON has no "not a number"
    assert model["train_steps"] == 50 and len(document["results"]) == 6 and report.notes == []


def test_a_link_is_called_by_what_it_is():
    assert describe_link("transport", "shm") == "over shm" and describe_link("gloo", "shm") == "over gloo"
    assert describe_link("100mbit", "shm") == "over 100mbit (1.00 ms)"
    assert describe_link("5ms+50Mbit", "shm") == "over 5ms+50Mbit"
