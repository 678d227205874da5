"""The site, built once for all these tests, and a real browser to look at it."""

import importlib.util
import json
import os
import runpy
import subprocess
import sys
import threading
from pathlib import Path

import filelock
import from_npm
import in_browser
import pytest

from microparallel.studio import Studio

ROOT = Path(__file__).parents[2]
reporting = runpy.run_path(str(ROOT / "tests" / "reporting" / "conftest.py"))


class Browser(reporting["Browser"]):
    """The browser of the reports' tests; it waits for a page of the site in its own way."""

    def open(self, path, width=1280, height=900, touch=False, dark=False):
        self.complaints.clear()
        metrics = {"width": width, "height": height, "deviceScaleFactor": 2 if touch else 1, "mobile": touch}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        features = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce"}
        listed = [{"name": name, "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=listed)
        address = Path(path).as_uri()
        self.call("Page.navigate", url=address)
        self.until(f"document.readyState === 'complete' && location.href === {address!r}")


@pytest.fixture(scope="module")
def browser(chromium, tmp_path_factory):
    browser = Browser(chromium, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The site as `make docs` builds it: its folder, and what `subprocess.run` gave.

    Several processes may run these tests at once: the first of them builds, and the others take what it has built.
    """
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("the site's tools are not installed; `make docs` installs them")
    place = tmp_path_factory.getbasetemp()
    place = place.parent if "PYTEST_XDIST_WORKER" in os.environ else place  # which all of them have
    folder, outcome = place / "site", place / "site.json"
    with filelock.FileLock(place / "site.lock"):
        if not outcome.exists():
            from_npm.fetch()  # from npm; without it the site says what it lacks
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
            environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "NO_COLOR": "1"}
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False
            )
            outcome.write_text(json.dumps([done.returncode, done.stdout, done.stderr]))
    return folder, subprocess.CompletedProcess("mkdocs build", *json.loads(outcome.read_text()))


@pytest.fixture(scope="session")
def site(built):
    folder, result = built
    assert result.returncode == 0, result.stderr
    return folder


class Visitor(reporting["Browser"]):
    """A browser at the studio's address. It complains of every request that leaves it, also of those of workers."""

    def __init__(self, program, folder, studio):
        self.base, self._fresh = f"http://127.0.0.1:{studio.port}/", []
        super().__init__(program, folder)
        waits = {"autoAttach": True, "waitForDebuggerOnStart": True, "flatten": True}
        self.call("Target.setAutoAttach", **waits)
        self.asked = []

    def _note(self, event):
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Target.attachedToTarget":
            self._fresh.append(parameters["sessionId"])
        elif method == "Network.requestWillBeSent":
            url = parameters["request"]["url"]
            self.asked.append(url)
            if not url.startswith((self.base, "data:", f"blob:{self.base}")):
                self.complaints.append(f"the page asked for {url}")
        else:
            super()._note(event)

    def call(self, method, **parameters):
        answer = super().call(method, **parameters)
        while self._fresh:  # a worker waits until its requests are seen
            page, self._session = self._session, self._fresh.pop()
            try:
                super().call("Network.enable")
                super().call("Runtime.runIfWaitingForDebugger")
            finally:
                self._session = page
        return answer

    def open(self, path, width=1280, height=900, touch=False, dark=False):
        self.complaints.clear()
        self.asked.clear()
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": touch}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        self.call("Emulation.setTouchEmulationEnabled", enabled=touch)
        features = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce"}
        listed = [{"name": name, "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=listed)
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=self.base + path)
        self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    def until(self, expression, seconds=50):
        return super().until(f"!!({expression})", seconds)

    def promise(self, expression):
        """What a promise of the page gives."""
        given = {"awaitPromise": True, "returnByValue": True}
        result = self.call("Runtime.evaluate", expression=expression, **given)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def key(self, key, code=None, number=0, text=None, modifiers=0):
        """Press a key, as a person does."""
        named = {"key": key, "code": code or key, "windowsVirtualKeyCode": number, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", **named, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **named)


@pytest.fixture(scope="session")
def studio(site, tmp_path_factory):
    """The studio, which serves the built site."""
    if in_browser.missing():
        pytest.skip(f"no Python for the browser here: {from_npm.fetch()}; `make docs` fetches it with npm")
    with Studio(tmp_path_factory.mktemp("runs"), site) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


@pytest.fixture(scope="module")
def visitor(chromium, studio, tmp_path_factory):
    visitor = Visitor(chromium, tmp_path_factory.mktemp("chromium"), studio)
    yield visitor
    visitor.close()


@pytest.fixture(scope="session")
def forks(fork_server):
    """What commands are forked from; None where they start in interpreters of their own."""
    return fork_server if hasattr(fork_server, "fork") else None
