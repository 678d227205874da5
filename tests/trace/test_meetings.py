"""Why a rank had to wait, in words."""

import microparallel as mp
from microparallel.trace import Trace, reasons


def test_reasons_for_waiting():
    trace = mp.simulate(mp.schedules.build("1f1b", 3, 3), mp.Costs(latency=1))
    found = {str(trace.events[place].op): reason for place, reason in reasons(trace).items()}
    assert found["F1.0"] == "rank 1 waited for A0.0 from rank 0 before F1.0"
    assert found["B0.0"] == "rank 0 waited for G0.0 from rank 1 before B0.0"
    assert "F0.0" not in found
    later = Trace([e._replace(start=e.start + 100, end=e.end + 100) for e in trace.events], trace.program)
    assert reasons(later) == reasons(trace)
    ddp = mp.simulate(mp.schedules.ddp(2, 1, 2), mp.Costs(latency=1))
    words = {reason for place, reason in reasons(ddp).items() if str(ddp.events[place].op) == "S"}
    assert words == {f"rank {rank} waited for the all-reduce of U0 before S" for rank in range(2)}


def test_the_reason_is_the_gather_before_it_not_a_later_one():
    trace = mp.simulate(mp.schedules.zero(3, 2, 2, 2, prefetch=0), mp.Costs(seconds_per_byte=10))
    found = {f"{event.op} of rank {event.rank}": reasons(trace).get(place) for place, event in enumerate(trace.events)}
    assert found["F0.0 of rank 0"] == "rank 0 waited for the all-gather of T1 before F0.0"
    assert found["B1.0 of rank 0"] == "rank 0 waited for the all-gather of T0 before B1.0"
