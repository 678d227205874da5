"""The diagnosis of flight files that were written by hand: each kind of fault, and worlds in which nothing is wrong."""

import pytest

from microparallel.observe.diagnosis import diagnose, show_findings
from microparallel.observe.flight_file import Record, Snapshot
from microparallel.observe.place import Place

NOW = 1000.0


class World:
    """Ranks whose calls are written as they would be, some seconds ago."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.records = {rank: [] for rank in range(ranks)}
        self.about = {rank: {} for rank in range(ranks)}

    def call(self, rank, text, line=1, ago=10.0, *, waits=True, group=None, done=False, **more):
        group = tuple(group or range(self.ranks))
        name = f"{group}"
        same = [one for one in self.records[rank] if (one.group_name, one.kind) == (name, "collective")]
        times = {"started": NOW - ago, "wait": NOW - ago if waits or done else None, "end": NOW - ago if done else None}
        self._add(rank, "collective", text, text, group, name, len(same) + 1, line, ago, times, more)

    def together(self, text="all_reduce(float32[4], op='sum')", times=3):
        for _ in range(times):
            for rank in self.records:
                self.call(rank, text, ago=20, done=True)

    def message(self, rank, kind, peer, content="float32[2]", line=1, ago=10.0, *, waits=True, done=False, **more):
        channel = [one for one in self.records[rank] if (one.kind, one.peer) == (kind, peer)]
        text = f"{'send_tensor' if kind == 'send' else 'recv_tensor'}({content}, {peer})"
        times = {"started": NOW - ago, "wait": NOW - ago if waits or done else None, "end": NOW - ago if done else None}
        group = tuple(range(self.ranks))
        more = {"peer": peer, **more}
        self._add(rank, kind, text, content, group, f"{group}", len(channel) + 1, line, ago, times, more)

    def _add(self, rank, kind, text, agreement, group, name, sequence, line, ago, times, more):
        number = len(self.records[rank]) + 1
        place = Place("/home/me/a.py", line)
        values = {"place": place, **times, **more}
        self.records[rank].append(Record(number, kind, text, agreement, group, name, sequence, NOW - ago, **values))

    def snapshots(self):
        return [
            Snapshot(rank, self.ranks, pid=100 + rank, now=NOW, records=tuple(self.records[rank]), **self.about[rank])
            for rank in range(self.ranks)
        ]

    def why(self, **options):
        return diagnose(self.snapshots(), **options)

    def only(self, **options):
        (finding,) = self.why(**options)
        assert finding.text.startswith(f"{finding.kind}: ")
        return finding


def stack(function, line):
    return (
        Place("/usr/lib/python3.11/site-packages/torch/x.py", 3, "inside"),
        Place("/home/me/data.py", line, function),
    )


def test_nothing_is_wrong_with_a_world_that_makes_progress():
    world = World(3)
    assert world.why() == []
    world.together()
    assert world.why() == []
    world.call(0, "barrier()", ago=0.4)  # the others will come
    assert world.why() == []
    assert world.why(longer_than=0.1)[0].kind == "straggler"


def test_a_straggler():
    world = World(4)
    world.together()
    for rank in (0, 1, 2):
        world.call(rank, "all_reduce(float32[1048576], op='sum')", line=88, ago=12 - rank)
    world.about[3] = {"stack": stack("load", 41), "step": 120}
    finding = world.only()
    assert (finding.kind, finding.ranks, str(finding.place)) == ("straggler", (3,), "data.py:41")
    assert finding.text == (
        "straggler: rank 3 is in no call: it is in load (data.py:41) at step 120; its last call was "
        "all_reduce(float32[4], op='sum') (a.py:1), 20 s ago; ranks 0, 1, 2 wait for it in "
        "all_reduce(float32[1048576], op='sum') (a.py:88), the 4th of the group, since 12 s"
    )


def test_a_straggler_that_gives_no_stack_is_known_by_what_it_said():
    world = World(2)
    world.call(0, "barrier()")
    world.about[1] = {"doing": "F1.3"}
    assert "it is doing F1.3; it has made no call; rank 0 waits for it" in world.only().text


def test_a_chain_of_waiting_ranks_is_followed_to_its_end():
    world = World(4)
    world.message(0, "recv", 1, line=1)
    world.message(1, "recv", 2, line=2)
    world.message(2, "recv", 3, line=3)
    world.about[3] = {"stack": stack("load", 41)}
    finding = world.only()
    assert (finding.kind, finding.ranks) == ("straggler", (3,))
    assert finding.text.endswith("; ranks 0, 1 wait for rank 2")


@pytest.mark.parametrize("ending", ["finished", "closed"])
def test_a_rank_that_left_its_loop_early(ending):
    world = World(3)
    world.together()
    world.call(0, "barrier()", line=5)
    world.call(2, "barrier()", line=5)
    world.about[1] = {"ending": ending, "state": "ended" if ending == "closed" else "running"}
    finding = world.only()
    assert (finding.kind, finding.ranks) == ("missing rank", (1,))
    assert "ranks 0, 2 wait for it in barrier() (a.py:5), the 4th of the group, since 10 s" in finding.text


def test_a_rank_that_goes_on_without_the_others():
    world = World(3)
    for rank in (0, 1):
        world.call(rank, "barrier()", line=5, group=[0, 1, 2])
    for _ in range(4):
        world.call(2, "all_reduce(float32[1])", line=9, ago=1, done=True, group=[2])
    finding = world.only()
    assert (finding.kind, finding.ranks, str(finding.place)) == ("missing rank", (2,), "a.py:9")
    assert "has gone on without that call, and made 4 others since" in finding.text


def test_a_rank_that_made_a_call_or_two_and_computes_now_is_a_straggler():
    world = World(2)
    world.message(0, "recv", 1)
    world.message(1, "recv", 0, ago=9, waits=False)
    world.about[1] = {"stack": stack("forward", 6)}
    assert world.only().kind == "straggler"


def test_a_rank_without_a_file():
    world = World(2)
    world.call(0, "barrier()")
    found = diagnose([world.snapshots()[0], Snapshot(1, 2, state="unknown")])
    assert (found[0].kind, found[0].ranks) == ("missing rank", (1,))


def test_wrong_order():
    world = World(4)
    world.together(times=40)
    for rank in range(4):
        call = "broadcast(float32[4], src=0)" if rank == 1 else "all_reduce(float32[4], op='sum')"
        world.call(rank, call, line=10 + rank)
    finding = world.only()
    assert (finding.kind, finding.ranks, str(finding.place)) == ("wrong order", (1,), "a.py:11")
    assert finding.text == (
        "wrong order: rank 1 entered broadcast(float32[4], src=0) (a.py:11) while ranks 0, 2, 3 entered "
        "all_reduce(float32[4], op='sum') (a.py:10): the 41st collective of the group"
    )


@pytest.mark.parametrize(
    ("odd", "usual", "kind"),
    [
        ("all_reduce(float32[5], op='sum')", "all_reduce(float32[4], op='sum')", "mismatched shape"),
        ("all_reduce(float32[4, 1], op='sum')", "all_reduce(float32[4], op='sum')", "mismatched shape"),
        ("all_reduce(int32[4], op='sum')", "all_reduce(float32[4], op='sum')", "mismatched dtype"),
        ("all_reduce(bfloat16[4], op='sum')", "all_reduce(float16[4], op='sum')", "mismatched dtype"),
        ("all_reduce(float32[4], op='max')", "all_reduce(float32[4], op='sum')", "mismatched op"),
        ("all_reduce(float32[4], op=MAX)", "all_reduce(float32[4], op=SUM)", "mismatched op"),
        ("broadcast(float32[4], src=1)", "broadcast(float32[4], src=0)", "mismatched root"),
        ("group([0, 1])", "group([0])", "mismatched call"),
    ],
)
def test_mismatches(odd, usual, kind):
    world = World(3)
    world.call(0, usual)
    world.call(1, usual)
    world.call(2, odd, line=7)
    finding = world.only()
    assert (finding.kind, finding.ranks, str(finding.place)) == (kind, (2,), "a.py:7")


def test_of_two_ranks_that_differ_both_are_named():
    world = World(2)
    world.call(0, "barrier()", line=3)
    world.call(1, "all_gather(float32[2])", line=4)
    assert "rank 1 entered all_gather(float32[2]) (a.py:4) while rank 0 entered barrier() (a.py:3)" in world.only().text


def test_messages_that_do_not_fit():
    world = World(2)
    world.message(0, "send", 1, "float32[3]", line=3, done=True)
    world.message(0, "send", 1, "float32[3]", line=4, done=True)
    world.message(1, "recv", 0, "float32[3]", line=8, done=True)
    world.message(1, "recv", 0, "float32[2]", line=9)
    finding = world.only()
    assert (finding.kind, finding.ranks, str(finding.place)) == ("mismatched shape", (1, 0), "a.py:9")
    assert finding.text.endswith("the 2nd message from rank 0 to rank 1")


def test_messages_of_as_many_bytes_in_another_shape_fit():
    world = World(2)
    world.message(0, "send", 1, "float32[4]", size=16, done=True)
    world.message(1, "recv", 0, "float32[2, 2]", size=16, done=True)
    assert world.why() == []


def test_receives_from_any_rank_are_not_counted():
    world = World(2)
    world.message(0, "send", 1, "float32[4]", done=True)
    world.message(0, "send", 1, "float32[2]", done=True)
    world.message(1, "recv", None, "float32[4]", done=True)
    world.message(1, "recv", 0, "float32[2]", done=True)
    assert world.why() == []


def test_an_old_mismatch_that_every_rank_survived_comes_last():
    world = World(3)
    for rank in range(3):
        world.call(rank, "all_reduce(int32[4])" if rank == 1 else "all_reduce(float32[4])", done=True, outcome="well")
    world.call(0, "barrier()")
    world.call(1, "barrier()")
    world.about[2] = {"stack": stack("load", 41)}
    assert [finding.kind for finding in world.why()] == ["straggler", "mismatched dtype"]


def test_a_deadlock_of_messages():
    world = World(4)
    world.message(2, "recv", 3, line=10, ago=12)
    world.message(3, "recv", 2, line=14, ago=11)
    world.call(0, "barrier()")
    world.call(1, "barrier()")
    finding = world.only()
    assert (finding.kind, finding.ranks, str(finding.place)) == ("deadlock", (2, 3), "a.py:10")
    assert finding.text == (
        "deadlock: 2 → 3 → 2: rank 2 waits in recv_tensor(float32[2], 3) (a.py:10) since 12 s, "
        "rank 3 in recv_tensor(float32[2], 2) (a.py:14) since 11 s; ranks 0, 1 wait for them"
    )


def test_a_deadlock_of_sends_that_block():
    world = World(3)
    for rank in range(3):
        world.message(rank, "send", (rank + 1) % 3, line=rank)
    assert world.only().text.startswith("deadlock: 0 → 1 → 2 → 0: rank 0 waits in send_tensor")


def test_a_deadlock_between_a_collective_and_a_message():
    world = World(3)
    world.call(0, "barrier()")
    world.call(2, "barrier()")
    world.message(1, "recv", 0)
    finding = world.only()
    assert (finding.kind, finding.ranks) == ("deadlock", (0, 1))
    assert finding.text.endswith("; rank 2 waits for them")


def test_a_deadlock_between_two_groups():
    world = World(3)
    world.call(0, "barrier()", group=[0, 1])
    world.call(1, "barrier()", group=[1, 2])
    world.call(2, "barrier()", group=[0, 2])
    finding = world.only()
    assert (finding.kind, finding.ranks) == ("deadlock", (0, 1, 2))
    assert "barrier() in the group 1, 2 (a.py:1)" in finding.text  # which counts its ranks in another way


def test_receives_that_were_posted_are_no_deadlock():
    world = World(2)
    world.message(0, "recv", 1, waits=False)
    world.message(1, "recv", 0)  # rank 0 computes, and will send
    world.about[0] = {"stack": stack("train", 5)}
    assert (world.only().kind, world.only().ranks) == ("straggler", (0,))


def test_a_rank_that_has_sent_its_message_is_not_blamed():
    world = World(2)
    world.message(0, "send", 1, waits=False)
    world.message(1, "recv", 0)
    assert (world.only().kind, world.only().ranks) == ("transfer", (1,))


def test_all_ranks_are_in_the_same_call():
    world = World(2)
    world.call(0, "barrier()")
    world.call(1, "barrier()")
    assert (world.only().kind, world.only().ranks) == ("transfer", (0, 1))


def test_any_rank_can_complete_a_receive_from_any():
    world = World(3)
    world.message(0, "recv", None)
    world.message(1, "recv", 0)
    world.about[2] = {"stack": stack("load", 9)}
    assert (world.only().kind, world.only().ranks) == ("straggler", (2,))


def test_a_death():
    world = World(3)
    world.together()
    for rank in (0, 1):
        world.call(rank, "all_reduce(float32[4], op='sum')", line=8, ago=2)
    world.about[2] = {"state": "ended", "exit": "SIGKILL", "step": 120}
    finding = world.only()
    assert (finding.kind, finding.ranks) == ("death", (2,))
    assert finding.text.startswith("death: rank 2 died (SIGKILL) at step 120; its last call was all_reduce")
    assert "ranks 0, 1 wait for it" in finding.text


def test_ranks_that_were_ended_because_another_died_come_after_it():
    world = World(3)
    world.call(0, "barrier()")
    for rank in range(3):
        world.about[rank] = {"state": "ended"}
    world.about[2] = {"state": "ended", "exit": "ended by its parent"}
    assert [finding.ranks for finding in world.why()] == [(1,), (0,)]


def test_a_death_inside_the_call():
    world = World(2)
    world.call(0, "barrier()", line=3)
    world.call(1, "barrier()", line=4)
    world.about[1] = {"state": "ended", "exit": "exit code 7"}
    finding = world.only()
    assert str(finding.place) == "a.py:4"
    assert "died (exit code 7); it was in barrier() (a.py:4); rank 0 waits for it in barrier() (a.py:3)" in finding.text


def test_the_rank_that_raised_is_blamed_not_those_that_failed_after_it():
    world = World(3)
    for rank in (0, 2):
        world.call(rank, "barrier()", outcome="failed", end=NOW - 1)
        world.about[rank] = {"ending": "broke off", "state": "ended", "end_reason": "PeerLost: rank 1 went away"}
    world.about[1] = {"ending": "raised", "end_reason": "ValueError: no", "end_place": Place("/b/model.py", 31)}
    finding = world.only()
    assert (finding.kind, finding.ranks, str(finding.place)) == ("death", (1,), "model.py:31")
    assert finding.text.startswith("death: rank 1 raised ValueError: no (model.py:31); ranks 0, 2 wait for it")


def test_ranks_that_gave_up_together_still_say_whom_they_waited_for():
    world = World(3)
    for rank in (0, 1):
        world.call(rank, "barrier()", ago=5, outcome="timed out", end=NOW - 3)
    world.about[0] = {"ending": "broke off"}
    world.about[2] = {"stack": stack("load", 9)}
    finding = world.only()
    assert (finding.kind, finding.ranks) == ("straggler", (2,))
    assert "ranks 0, 1 wait for it in barrier() (a.py:1), the 1st of the group, since 2.0 s" in finding.text


def test_a_stopped_rank():
    world = World(2)
    world.call(0, "barrier()")
    world.call(1, "barrier()", line=6)
    world.about[1] = {"state": "stopped"}
    finding = world.only()
    assert (finding.kind, finding.ranks, str(finding.place)) == ("stopped", (1,), "a.py:6")


def test_a_message_of_another_size_that_ends_a_rank_in_gloo_is_the_cause():
    world = World(2)
    world.call(0, "all_gather(float32[2])")
    world.call(1, "all_gather(float32[3])")
    world.about[0] = {"state": "ended", "exit": "SIGABRT"}
    assert [finding.kind for finding in world.why()] == ["mismatched shape", "death"]


def test_calls_that_were_left_to_themselves_count_when_nothing_else_is_known():
    """As torch's DDP does it: its main thread waits in C++."""
    world = World(3)
    for rank in (0, 1):
        world.call(rank, "all_reduce(float32[9], op=SUM)", waits=False)
        world.about[rank] = {"stack": stack("train", 7)}
    world.about[2] = {"stack": stack("load", 41)}
    finding = world.only()
    assert (finding.kind, finding.ranks, str(finding.place)) == ("straggler", (2,), "data.py:41")


def test_what_no_longer_fits_into_a_file_is_not_held_against_its_rank():
    world = World(2)
    world.call(0, "barrier()", group=[0, 1])
    for _ in range(256):
        world.message(1, "send", 0, waits=False)
    assert [finding.kind for finding in world.why()] == ["transfer"]


def test_two_independent_faults_are_both_found():
    world = World(5)
    world.message(0, "recv", 1)
    world.message(1, "recv", 0)
    world.message(2, "recv", 3)
    world.about[3] = {"stack": stack("load", 41)}
    world.about[4] = {"state": "stopped"}
    assert [(finding.kind, finding.ranks) for finding in world.why()] == [
        ("stopped", (4,)),
        ("deadlock", (0, 1)),
        ("straggler", (3,)),
    ]


def test_many_findings_are_cut():
    world = World(8)
    for rank in range(8):
        world.about[rank] = {"state": "ended"}
    assert show_findings(world.why()).count("\n") == 4
    assert show_findings(world.why()).endswith("and 4 more; see `microparallel why`")
    assert show_findings([]) == ""
