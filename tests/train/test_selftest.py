"""The self-test of `microparallel doctor`: what it tries, and that it notices what is wrong."""

import pytest

from microparallel.train.selftest import Setting, settings_here, wrong_collectives


@pytest.mark.parametrize(("reason", "transports"), [("", ["shm", "gloo"]), ("it needs Linux", ["gloo"])])
def test_shared_memory_and_gloo_are_tried_with_four_ranks_on_the_cpu(monkeypatch, reason, transports):
    monkeypatch.setattr("microparallel.transport.shared_memory.futex.why_not", lambda: reason)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert settings_here() == [Setting(transport, "cpu", 4) for transport in transports]
    assert [setting.ranks for setting in settings_here(2)] == [2] * len(transports)


def with_a_wrong_all_reduce(comms):
    honest = comms.all_reduce

    def all_reduce(tensor, *arguments, **named):
        honest(tensor, *arguments, **named)
        return tensor.add_(1) if tensor.data_ptr() in made else tensor

    made = set()
    empty = comms.empty

    def remembered(*arguments):
        tensor = empty(*arguments)
        made.add(tensor.data_ptr())
        return tensor

    comms.all_reduce, comms.empty = all_reduce, remembered
    return wrong_collectives(comms)


def test_collectives_are_right_and_a_wrong_one_is_named(any_pool):
    assert any_pool.run(wrong_collectives, 3) == [[]] * 3
    assert any_pool.run(with_a_wrong_all_reduce, 2) == [["all_reduce of comms.empty"]] * 2
