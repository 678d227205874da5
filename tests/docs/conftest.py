"""The site, built once for all these tests, and a real browser to look at it."""

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import filelock
import pytest

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
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
            environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "NO_COLOR": "1"}
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
            )
            outcome.write_text(json.dumps([done.returncode, done.stdout, done.stderr]))
    return folder, subprocess.CompletedProcess("mkdocs build", *json.loads(outcome.read_text()))


@pytest.fixture(scope="session")
def site(built):
    folder, result = built
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="session")
def forks(fork_server):
    """What commands are forked from; None where they start in interpreters of their own."""
    return fork_server if hasattr(fork_server, "fork") else None
