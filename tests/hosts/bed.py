"""Hosts inside this machine: each has its own address, name, processes and shared memory, and a link that can break.

```
    alpha 10.77.0.1 ── eth0   port0 ──┐
    beta  10.77.0.2 ── eth0   port1 ──┤ a bridge, in a namespace of its own: the switch
    gamma 10.77.0.3 ── eth0   port2 ──┘
```

A host is a set of Linux namespaces, held by a process (`cat`) that reads from a pipe of the test's. When the test ends,
however it ends, the kernel closes that pipe; `cat` ends, with it every process of the host, and the network goes with
the last of them. Nothing has a name outside, so nothing can be left behind.

As on Debian and Ubuntu, a host's own name stands for 127.0.1.1 there.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import program_of

HERE = Path(__file__).resolve().parent
NAMES = ("alpha", "beta", "gamma")
PORT = 29400
_APART = ["--net", "--mount", "--uts", "--ipc", "--pid"]
_TOOLS = ("ip", "tc", "unshare", "nsenter")


@functools.cache
def why_not() -> str:
    """Why there can be no hosts here; empty if there can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if sys.platform != "linux" or missing:
        return f"hosts inside this machine need Linux and {', '.join(_TOOLS)} (Debian: iproute2, util-linux)"
    made = subprocess.run(
        ["unshare", *_APART, "--fork", "--mount-proc", "ip", "link", "add", "name", "probe", "type", "veth"],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    reason = made.stderr.strip().partition("\n")[0]
    return f"this machine does not permit namespaces ({reason}); root may make them" if made.returncode else ""


class Held:
    """Namespaces, and the process that holds them."""

    def __init__(self, setup: str, ahead: int = 0) -> None:
        clock = ["--time", "--monotonic", str(ahead), "--boottime", str(ahead)] if ahead else []
        command = ["unshare", *_APART, *clock, "--fork", "--kill-child=SIGKILL", "--mount-proc", "sh", "-ec"]
        self._process = subprocess.Popen(
            [*command, f"{setup}\necho ready\nexec cat >/dev/null"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._process.stdout.readline() != "ready\n":
            self.close()
            raise OSError("a host could not be made")
        outside = self._process.pid
        self.pid = int(Path(f"/proc/{outside}/task/{outside}/children").read_text().split()[0])

    def do(self, *words: str, batch: str = "") -> str:
        """Run a short command inside; returns what it printed."""
        command = ["nsenter", "--target", str(self.pid), "--all", *words]
        done = subprocess.run(command, input=batch, capture_output=True, text=True, timeout=20, check=False)
        if done.returncode:
            raise OSError(f"{' '.join(words)} failed: {done.stderr}")
        return done.stdout

    def ip(self, *lines: str) -> None:
        """Change the network inside by lines of `ip -batch -`."""
        self.do("ip", "-batch", "-", batch="\n".join(lines))

    def kill(self) -> None:
        """End every process inside at once, as when the power fails."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._process.wait(20)

    def close(self) -> None:
        """Let `cat` end, and with it all that is inside."""
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(20)


class Running:
    """A process on a host, and what it has printed so far."""

    def __init__(self, process, output: Path, errors: Path) -> None:
        self._process, self._output, self._errors = process, output, errors
        self._began = time.monotonic()
        self.pid, self.poll = process.pid, process.poll

    @property
    def output(self) -> str:
        return self._output.read_text("utf-8", "replace")

    @property
    def errors(self) -> str:
        return self._errors.read_text("utf-8", "replace")

    def wait(self, seconds: float) -> int:
        """The exit code; raises `subprocess.TimeoutExpired` with what was printed if that takes longer."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            error.args = (*error.args, self.output, self.errors)
            raise AssertionError(f"not ended after {seconds} s; it printed:\n{self.output}\n{self.errors}") from error

    def until(self, words: str, seconds: float) -> float:
        """Wait until it has printed these words; returns after how many seconds from its start."""
        deadline = time.monotonic() + seconds
        while words not in self.output + self.errors:
            if time.monotonic() > deadline or self.poll() is not None:
                if words in self.output + self.errors:
                    break
                raise AssertionError(f"no {words!r} in what it printed:\n{self.output}\n{self.errors}")
            time.sleep(0.01)
        return time.monotonic() - self._began

    def close(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()


class Host:
    """One of the hosts, and its link."""

    def __init__(self, number: int, names: int, switch: Held, start, private: list[Path], ahead: int) -> None:
        self.name, self.address = NAMES[number], f"10.77.0.{number + 1}"
        self._start, self._switch, self._port, self._bridge = start, switch, f"port{number}", "br0"
        self._relay: subprocess.Popen | None = None
        self.held = Held(_setup(number, names, private), ahead * number)
        ends = f"{self._port} netns {switch.pid} type veth peer name eth0 netns {self.held.pid}"
        subprocess.run(["ip", "link", "add", "name", *ends.split()], check=True, timeout=20)
        self.held.ip("link set lo up", f"address add {self.address}/24 dev eth0", "link set eth0 up")
        switch.ip(f"link set {self._port} master br0 up")

    def run(self, *words: str, module=(), **environment) -> Running:
        """Start `microparallel …` or `python script.py …` here; `module`: what `python` is given in between."""
        return self._start(self.held.pid, words, module, environment)

    def do(self, *words: str) -> str:
        """Run a short command here; returns what it printed."""
        return self.held.do(*words)

    # ── what may happen to a host ───────────────────────────────────────────────────────────────────────────────

    def kill(self) -> None:
        """The power fails."""
        self.held.kill()

    def unplug(self) -> None:
        """The cable is pulled: both ends see it."""
        self._switch.ip(f"link set {self._port} down")

    def plug(self) -> None:
        """The cable is put back."""
        self._switch.ip(f"link set {self._port} up")

    def part(self) -> None:
        """The network behind the cable drops everything, and no end sees anything."""
        self._switch.ip(f"link set {self._port} nomaster")

    def join(self) -> None:
        """The network works again."""
        self._switch.ip(f"link set {self._port} master {self._bridge}")

    def limit(self, rate: str) -> None:
        """From now on the link carries so much, both ways: `10mbit`."""
        for end, device in ((self.held, "eth0"), (self._switch, self._port)):
            shape = ["tbf", "rate", rate, "burst", "32kb", "latency", "400ms"]
            end.do("tc", "qdisc", "replace", "dev", device, "root", *shape)

    def lose(self, part: float) -> None:
        """From now on, this part of what arrives here is lost."""
        self.drop("-m", "statistic", "--mode", "random", "--probability", str(part))

    def drop(self, *which: str) -> None:
        """From now on, of what arrives here these packets are lost."""
        if shutil.which("iptables") is None:
            pytest.skip("needs iptables (Debian: iptables)")
        self.do("iptables", "-A", "INPUT", "-i", "eth0", *which, "-j", "DROP")

    def delay(self, seconds: float) -> None:
        """From now on, everything takes so much longer, each way: a relay stands between this host and the bridge."""
        near, far, self._bridge = f"near-{self._port}", f"far-{self._port}", f"br-{self._port}"
        relay = [sys.executable, "-SE", str(HERE / "relay.py"), near, far, str(seconds)]
        enter = ["nsenter", "--target", str(self._switch.pid), "--all"]
        self._relay = subprocess.Popen([*enter, *relay], stdout=subprocess.PIPE, text=True)
        if self._relay.stdout.readline() != "ready\n":
            raise OSError("the relay has not begun")
        self._switch.ip(
            f"link add {self._bridge} type bridge",
            f"link set {self._bridge} up",
            f"link set {near} master {self._bridge} up",
            f"link set {far} master br0 up",
            f"link set {self._port} master {self._bridge}",
        )

    def close(self) -> None:
        """Remove it."""
        self.held.close()
        if self._relay is not None:
            self._relay.kill()
            self._relay.stdout.close()
            self._relay.wait(20)


class Bed:
    """Some hosts, and the switch between them; each monotonic clock is `ahead` seconds ahead of the one before."""

    def __init__(self, count: int, start, private: list[Path], ahead: int = 0) -> None:
        self._parts = contextlib.ExitStack()
        with contextlib.ExitStack() as so_far:
            switch = Held("ip link add br0 type bridge; ip link set br0 up")
            so_far.callback(switch.close)
            self.hosts = []
            for number in range(count):
                self.hosts.append(Host(number, count, switch, start, private, ahead))
                so_far.callback(self.hosts[-1].close)
            while "DOWN" in switch.do("ip", "-brief", "link", "show", "master", "br0"):
                pass  # the kernel takes up to a second to see that both ends of a link are there
            self._parts = so_far.pop_all()

    def __iter__(self):
        return iter(self.hosts)

    def __getitem__(self, number: int) -> Host:
        return self.hosts[number]

    def ranks(self, *words: str, on_each: int = 1, address: str = "", **environment) -> list[Running]:
        """Start ranks of one world on all hosts, with the variables that torchrun or a script of one's own would set.

        Rank 0, on the first host, serves the store at `address`; else that is the host's own.
        """
        return [
            host.run(*words, **self.variables(node, local, on_each, address), **environment)
            for node, host in enumerate(self.hosts)
            for local in range(on_each)
        ]

    def variables(self, node: int, local: int, on_each: int, address: str = "") -> dict[str, object]:
        """The variables of one rank."""
        numbers = {"RANK": node * on_each + local, "LOCAL_RANK": local, "GROUP_RANK": node}
        counts = {"WORLD_SIZE": len(self.hosts) * on_each, "LOCAL_WORLD_SIZE": on_each}
        return numbers | counts | {"MASTER_ADDR": address or self.hosts[0].address, "MASTER_PORT": PORT}

    def torchrun(self, *words: str, on_each: int = 1, flags=(), **environment) -> list[Running]:
        """Start torchrun on each host, as the README says."""
        return [
            host.run(
                *words,
                module=[
                    *("-m", "torch.distributed.run", f"--nnodes={len(self.hosts)}", f"--node-rank={node}"),
                    *(f"--nproc-per-node={on_each}", f"--master-addr={self.hosts[0].name}", *flags),
                ],
                **environment,
            )
            for node, host in enumerate(self.hosts)
        ]

    def elastic(self, host: Host, *words: str, hosts: str = "1:3", on_each: int = 1, flags=(), **environment):
        """Start torchrun on one host, as leaving_one_machine.md says; the first host serves the rendezvous.

        A host counts as lost after 10 seconds without a sign of life, as it may on a busy machine with less; and when
        there are hosts enough, others have 2 seconds to join.
        """
        patience = "keep_alive_interval=1,keep_alive_max_attempt=10,last_call_timeout=2"
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={self.hosts[0].name}:{PORT}", f"--rdzv-conf={patience}"]
        torchrun = [f"--nnodes={hosts}", f"--nproc-per-node={on_each}", "--max-restarts=5", *meeting, *flags]
        apart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}
        return host.run("python", HERE / "agent.py", *torchrun, "-m", *words, **apart | environment)

    def close(self) -> None:
        """Remove them all."""
        self._parts.close()


def _setup(number: int, count: int, private: list[Path]) -> str:
    """Shell commands that make namespaces a host: its name, what names stand for, memory and folders of its own."""
    others = [f"10.77.0.{other + 1} {NAMES[other]}" for other in range(count) if other != number]
    names = "\n".join(["127.0.0.1 localhost", f"127.0.1.1 {NAMES[number]}", *others])
    own = ["mount -t tmpfs -o size=1g shm /dev/shm", *(f"mount -t tmpfs -o size=1g own '{one}'" for one in private)]
    tables = [
        f"printf '{names}\n' >/run/hosts && mount --bind /run/hosts /etc/hosts",
        "printf 'nameserver 127.0.0.1\n' >/run/resolv && mount --bind /run/resolv /etc/resolv.conf",
    ]
    return "\n".join([f"hostname {NAMES[number]}", "mount -t tmpfs run /run", *tables, *own])


def starter(fork_server, folder: Path, printed: Path):
    """A function that starts a process inside a host, and keeps what it prints; `started` lists them."""
    started: list[Running] = []

    def start(holder: int, words, module, environment) -> Running:
        words = [str(word) for word in words]
        values = os.environ | {name: str(value) for name, value in environment.items()}
        output, errors = (printed / f"{kind}-{len(started)}" for kind in ("output", "errors"))
        forked = hasattr(fork_server, "fork") and not module
        if forked:
            enter = f"import sys; sys.path.append({str(HERE)!r}); import entering; entering.enter({holder}); "
            with contextlib.chdir(folder):
                output.touch(), errors.touch()
                process = fork_server.fork([enter + program_of(words, output, errors)], pass_fds=[], env=values)
        else:
            command = ["-m", *words] if words[0] == "microparallel" else words[1:]
            enter = ["nsenter", "--target", str(holder), "--all", f"--wdns={folder}"]
            with output.open("wb") as first, errors.open("wb") as second:
                process = subprocess.Popen(
                    [*enter, sys.executable, *module, *command],
                    env=values,
                    stdin=subprocess.DEVNULL,
                    stdout=first,
                    stderr=second,
                    process_group=0,
                )
        started.append(Running(process, output, errors))
        return started[-1]

    start.started = started
    return start
