"""The hosts of these tests are what they say: apart from each other, with links that break; and they leave nothing."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.hosts.bed import HERE, why_not

PING = "import socket; socket.create_connection(('beta', 7), timeout=5)"
SERVE = "import socket; s = socket.create_server(('', 7)); print('ready', flush=True); [s.accept() for _ in range(9)]"


@pytest.fixture
def script(tmp_path):
    def write(name, text):
        (tmp_path / name).write_text(text)
        return name

    return write


def test_hosts_have_names_addresses_processes_and_memory_of_their_own(hosts):
    alpha, beta = hosts(2)
    assert alpha.do("hostname").strip() == "alpha"
    assert alpha.do("getent", "hosts", "alpha").split() == ["127.0.1.1", "alpha"]
    assert alpha.do("getent", "hosts", "beta").split() == [beta.address, "beta"]
    alpha.do("touch", "/dev/shm/mine")
    assert beta.do("ls", "/dev/shm") == ""
    assert len(alpha.do("sh", "-c", "ls -d /proc/[0-9]*").split()) < 5


def test_a_link_that_is_cut_and_healed(hosts, script):
    alpha, beta = hosts(2)
    beta.run("python", script("serve.py", SERVE)).until("ready", 20)
    ping = script("ping.py", PING.replace("timeout=5", "timeout=0.3"))
    assert alpha.run("python", ping).wait(20) == 0
    for cut, heal in ((beta.unplug, beta.plug), (beta.part, beta.join)):
        cut()
        broken = alpha.run("python", ping)
        assert broken.wait(20) == 1
        assert "TimeoutError" in broken.errors or "No route" in broken.errors
        heal()
        alpha.run("python", script("again.py", PING)).wait(20)


def test_delay_and_rate_do_not_cut_a_link(hosts, script):
    alpha, beta = hosts(2)
    beta.run("python", script("serve.py", SERVE)).until("ready", 20)
    beta.delay(0.05)
    beta.limit("10mbit")
    timed = f"import time; begin = time.monotonic(); {PING}; print(time.monotonic() - begin > 0.1)"
    measured = alpha.run("python", script("ping.py", timed))
    assert (measured.wait(20), measured.output) == (0, "True\n")


def test_nothing_is_left_when_the_tests_are_killed(tmp_path):
    if reason := why_not():
        pytest.skip(reason)
    program = f"""
import sys
sys.path += [{str(HERE.parents[1])!r}, {str(HERE.parents[1] / "docs" / "tools")!r}]
from pathlib import Path
from tests.hosts.bed import Bed, starter
bed = Bed(2, starter(None, Path({str(tmp_path)!r}), Path({str(tmp_path)!r})), [])
bed[1].delay(0.01)
print(*(host.held.pid for host in bed), bed[1]._relay.pid, flush=True)
sys.stdin.read()
"""
    tests = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    held = [int(pid) for pid in tests.stdout.readline().split()]
    assert len(held) == 3
    tests.send_signal(signal.SIGKILL)
    tests.communicate(timeout=10)
    while any(_runs(pid) for pid in held):  # the test's own timeout ends this
        pass
    assert not Path("/sys/class/net/port0").exists()


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
