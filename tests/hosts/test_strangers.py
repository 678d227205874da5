"""What a stranger on the network can reach of a world that runs, and what that does to it (see SECURITY.md)."""

import socket

import pytest

WAIT = """
import pathlib, time, torch, microparallel as mp
def work(comms):
    print("joined", flush=True)
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
    print(comms.all_reduce(torch.tensor([comms.rank + 1])).item(), flush=True)
"""
CONNECT = WAIT + "with mp.connect(timeout=30) as comms: work(comms)"
LAUNCH = WAIT + "if __name__ == '__main__': mp.launch(work, 2, transport='gloo')"
# Tries each port, says hello in no protocol, and prints which ports were open.
STRANGER = """
import socket, sys
for port in map(int, sys.argv[2:]):
    try:
        with socket.create_connection((sys.argv[1], port), timeout=2) as connection:
            connection.sendall(b"\\xff" * 4096)
            print(port)
    except ConnectionRefusedError:
        pass
"""
WRITER = """
import sys, torch.distributed as dist
store = dist.TCPStore(sys.argv[1], 29400, is_master=False)
store.set("a stranger's key", "a stranger's value")
print(store.get("microparallel/can/0").decode())
"""


def listening(host):
    """Where processes of a host listen: addresses and ports."""
    found = set()
    for line in host.do("cat", "/proc/net/tcp", "/proc/net/tcp6").splitlines():
        place, state = line.split()[1], line.split()[3]
        if state == "0A":
            number, _, port = place.partition(":")
            words = [bytes.fromhex(number[at : at + 8])[::-1] for at in range(0, len(number), 8)]
            family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
            found.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found


@pytest.fixture
def scripts(tmp_path):
    for name, text in {"connect": CONNECT, "launch": LAUNCH, "stranger": STRANGER, "writer": WRITER}.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def went_on(scripts, ranks):
    (scripts / "go").touch()
    for rank in ranks:
        assert rank.wait(30) == 0, rank.errors
    return [rank.output.split()[-1] for rank in ranks]


@pytest.mark.parametrize("how", ["connect", *(pytest.param(how, marks=pytest.mark.slow) for how in ("launch", "name"))])
def test_ranks_of_one_host_listen_where_no_other_host_reaches_them(hosts, scripts, how):
    alpha, beta = bed = hosts(2)
    if how == "launch":
        ranks = [alpha.run("python", "launch.py")]
    else:
        place = "127.0.0.1" if how == "connect" else "localhost"
        one_host = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "RANK": 1, "LOCAL_RANK": 1}
        first = bed.variables(0, 0, 2, place) | one_host
        ranks = [alpha.run("python", "connect.py", **first | {"RANK": n, "LOCAL_RANK": n}) for n in range(2)]
    for rank in ranks:
        rank.until("joined", 30)
    found = listening(alpha)
    assert found
    assert {address for address, _ in found} <= {"127.0.0.1", "::1"}
    stranger = beta.run("python", "stranger.py", alpha.address, *(port for _, port in found))
    assert (stranger.wait(20), stranger.output) == (0, "")
    assert went_on(scripts, ranks)[-1] == "3"


def test_ranks_of_two_hosts_listen_on_their_network_alone_and_survive_a_stranger(hosts, scripts):
    bed = hosts(3)
    alpha, beta, gamma = bed
    ranks = [
        host.run("python", "connect.py", **bed.variables(node, 0, 1) | {"WORLD_SIZE": 2})
        for node, host in enumerate((alpha, beta))
    ]
    for rank in ranks:
        rank.until("joined", 30)
    for host in (alpha, beta):
        found = listening(host)
        assert {address for address, _ in found} == {host.address}
        stranger = gamma.run("python", "stranger.py", host.address, *(port for _, port in found))
        assert stranger.wait(20) == 0, stranger.errors
        assert len(stranger.output.split()) == len(found)  # it reaches all of them
    writer = gamma.run("python", "writer.py", alpha.address)
    assert writer.wait(20) == 0, writer.errors
    assert '"host": "alpha"' in writer.output  # it reads the store, and writes into it
    assert went_on(scripts, ranks) == ["3", "3"]
