"""What `nvidia-cuda-mps-control` does, without a GPU: `install(folder)` writes a program of that name.

With -d it starts a daemon and returns once that listens; otherwise it hands the daemon what stands on its input. The
daemon writes its number into the pipe folder, starts a server, and quits when it is told to. FAKE_MPS makes it
"stubborn" (it never quits, and answers nothing) or "broken" (it does not start). Each daemon leaves a line in
FAKE_MPS_LOG: its number and its server's, its folder, the files that it has open, and its environment.
"""

import os
import signal
import socket
import sys
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"


def install(folder):
    """Put the program into a folder; returns its path."""
    folder.mkdir(exist_ok=True)
    program = folder / CONTROL
    program.write_text(
        f"#!{sys.executable} -ISs\n" + Path(__file__).read_text("utf-8") + "\n\nmain(sys.argv[1:])\n", "utf-8"
    )
    program.chmod(0o755)
    return program


def main(arguments):
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    if arguments == ["-d"]:
        if os.environ.get("FAKE_MPS") == "broken":
            sys.exit("An instance of this daemon is already running")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(folder / "control"))
        listener.listen()
        if os.fork():
            os._exit(0)
        os.setsid()
        if os.fork():
            os._exit(0)
        _be_the_daemon(folder, listener)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(folder / "control"))
    except OSError:
        sys.exit("Cannot find MPS control daemon process")
    connection.sendall(sys.stdin.buffer.read() + b"\0")
    print(connection.recv(1000).decode())


def _be_the_daemon(folder, listener):
    server = os.fork()
    if server == 0:
        while True:
            signal.pause()
    files = _open_files()
    pid_file = folder / f"{CONTROL}.pid"
    with open(os.environ["FAKE_MPS_LOG"], "a") as log:
        log.write(f"{[os.getpid(), server, str(folder), files, dict(os.environ)]!r}\n")
    pid_file.write_text(str(os.getpid()))
    while True:
        client, _ = listener.accept()
        asked = b""
        while not asked.endswith(b"\0"):
            asked += client.recv(1000)
        if os.environ.get("FAKE_MPS") == "stubborn":
            client.close()
            continue
        if asked.startswith(b"quit"):
            os.kill(server, signal.SIGKILL)
            os.waitpid(server, 0)
            pid_file.unlink()
            os._exit(0)
        client.sendall(str(server).encode())


def _open_files():
    files = {}
    for path in Path("/proc/self/fd").iterdir():
        try:
            files[path.name] = str(path.readlink())
        except FileNotFoundError:  # that of the listing itself
            continue
    return files
