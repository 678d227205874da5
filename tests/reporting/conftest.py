"""Traces to report on, and a real browser to look at the page: Chromium, spoken to over a pipe."""

import base64
import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from tests.spans import recorded, span

from microparallel.reporting import Run


def ddp_step(step=0, ranks=4, buckets=3, begin=0.0, slow=3):
    """Forward, backward with overlapped buckets, optimizer; one rank computes longer, in milliseconds."""
    events = []
    group = tuple(range(ranks))
    handed = [[begin + (8 + 4 * bucket) * (1.25 if rank == slow else 1) for bucket in range(buckets)] for rank in group]
    met = [max(handed[rank][bucket] for rank in group) for bucket in range(buckets)]
    for rank in group:
        last = handed[rank][-1]
        back = met[-1] + 3
        events += [
            span(rank, "forward", "forward of GPT", begin, begin + 5, step=step),
            span(rank, "backward", "backward", begin + 5, back, step=step),
            span(rank, "optimizer", "AdamW", back, back + 2 + rank / 4, step=step),
        ]
        for bucket in range(buckets):
            end = met[bucket] + 3
            waited = last if end > last else None
            numbers = {"number": step * buckets + bucket, "bytes": 1_000_000, "group": group}
            times = (handed[rank][bucket], end)
            events.append(
                span(
                    rank, "collective", "all_reduce(float32[250000], op='sum')", *times, step, waited=waited, **numbers
                )
            )
    return [scaled(event, 1e-3) for event in events]


def pipeline_step():
    """Two stages, one micro-batch: a message there, and one back."""
    events = [
        span(0, "forward", "F0.0", 0, 4),
        span(0, "send", ">A0.0@1", 4, 5, peer=1, bytes=4096, place="model.py:88"),
        span(1, "receive", "<A0.0@0", 0, 6, waited=0, peer=0, bytes=4096, place="model.py:90"),
        span(1, "forward", "F1.0", 6, 10),
        span(1, "backward", "B1.0", 10, 18),
        span(1, "send", ">G1.0@0", 18, 19, peer=0, bytes=4096),
        span(0, "receive", "<G1.0@1", 5, 20, waited=5, peer=1, bytes=4096),
        span(0, "backward", "B0.0", 20, 28),
    ]
    return [scaled(event, 1e-3) for event in events]


def scaled(event, by):
    waited = None if event.waited is None else event.waited * by
    return event._replace(start=event.start * by, end=event.end * by, waited=waited)


@pytest.fixture
def trace():
    steps = [ddp_step(step, begin=30 * step, slow=2 + step % 2) for step in range(5)]
    return recorded(4, [event for step in steps for event in step], about={"model": "gpt", "first step": 3})


@pytest.fixture
def pipeline():
    return recorded(2, pipeline_step())


@pytest.fixture
def run(trace):
    """A whole run: what `microparallel train --trace` leaves behind."""
    metrics = [{"step": step, "loss": 3 / step, "samples_per_second": 900.0 + step} for step in range(1, 31)]
    metrics.append({"step": 30, "validation_loss": 0.12, "validation_accuracy": 0.91})
    config = {"model": "gpt", "ranks": 4, "strategy": "ddp", "steps": 30}
    summary = {"loss": 0.1, "validation_accuracy": 0.91, "samples_per_second": 950.0, "steps": 30}
    return Run("first", config, metrics, summary, trace)


def write_run(folder, run):
    """Put a run where `read_run` finds it."""
    folder.mkdir(exist_ok=True)
    rows = "".join(f"{key} = {json.dumps(value)}\n" for key, value in run.config.items())
    (folder / "config.toml").write_text(rows)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in run.metrics))
    (folder / "summary.json").write_text(json.dumps(run.summary))
    if run.trace is not None:
        (folder / "trace.json").write_text(run.trace.to_json())
    if run.predicted is not None:
        (folder / "predicted.json").write_text(run.predicted.to_json())
    return folder


@pytest.fixture
def run_folder(tmp_path, run):
    return write_run(tmp_path / "first", run)


# From the first moment of a page, count what is painted: how much work a page is can be told without a clock.
COUNT = """
    window.painted = 0;
    const pen = CanvasRenderingContext2D.prototype;
    for (const name of Object.getOwnPropertyNames(pen)) {
        const { value } = Object.getOwnPropertyDescriptor(pen, name);
        if (typeof value !== "function" || name === "constructor") continue;
        pen[name] = function (...given) {
            window.painted += 1;
            return value.apply(this, given);
        };
    }
"""


class Browser:
    """Chromium without a window; it reads commands from file 3 and answers into file 4, a zero byte behind each."""

    def __init__(self, program, folder):
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
        ]
        # Its files have to be 3 and 4, which the shell sees to.
        command = f'exec "$0" "$@" 3<&{commands} 4>&{answers}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, program, *flags, f"--user-data-dir={folder}", "about:blank"],
            pass_fds=[commands, answers],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._rest, self._count, self._session = b"", 0, None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.complaints = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.addScriptToEvaluateOnNewDocument", source=COUNT)

    def call(self, method, **parameters):
        """Do something, and return what came of it; complaints that come meanwhile are kept."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer)

    def _next(self):
        while b"\0" not in self._rest:
            part = os.read(self._answers, 1 << 20)
            assert part, "Chromium has ended"
            self._rest += part
        line, self._rest = self._rest.split(b"\0", 1)
        return json.loads(line)

    def _note(self, event):
        parameters = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif event.get("method") == "Log.entryAdded":
            self.complaints.append(parameters["entry"]["text"])
        elif event.get("method") == "Network.requestWillBeSent":
            url = parameters["request"]["url"]
            if not url.startswith(("file:", "data:")):
                self.complaints.append(f"the page asked for {url}")

    def open(self, path, width=1280, height=900, touch=False, dark=False, calm=True):
        """Show a page, and return when it is drawn."""
        self.complaints.clear()
        metrics = {"width": width, "height": height, "deviceScaleFactor": 2 if touch else 1, "mobile": touch}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        self.call("Emulation.setTouchEmulationEnabled", enabled=touch)
        features = {"prefers-color-scheme": "dark" if dark else "light"}
        features["prefers-reduced-motion"] = "reduce" if calm else "no-preference"
        listed = [{"name": name, "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=listed)
        self.call("Page.navigate", url=Path(path).as_uri())
        self.until("((page) => page?.shownMs ?? page?.error)(document.documentElement?.dataset)")

    def value(self, expression):
        """What an expression is in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, expression, seconds=20):
        """Wait until an expression is true."""
        deadline = time.monotonic() + seconds
        while not (value := self.value(expression)):
            assert time.monotonic() < deadline, f"never true: {expression}; {self.complaints}"
            time.sleep(0.01)
        return value

    def mouse(self, kind, x, y, **more):
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)

    def touch(self, kind, *points):
        listed = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(points)]
        self.call("Input.dispatchTouchEvent", type=f"touch{kind}", touchPoints=listed)

    def press(self, key, text=None):
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def picture(self, file, whole=True):
        """Write a picture of the page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        Path(file).write_bytes(base64.b64decode(shot["data"]))

    def close(self):
        os.close(self._commands)
        self._process.terminate()
        self._process.wait(10)
        os.close(self._answers)


@pytest.fixture(scope="module")
def browser(chromium, tmp_path_factory):
    browser = Browser(chromium, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()
