"""Recordings in files."""

import json

from microparallel.trace.recording import Recording, Span


def test_a_saved_recording_is_what_report_reads(tmp_path):
    recording = Recording(1, [Span(0, "forward", "forward", 0.0, 1.0)])
    recording.save(tmp_path / "runs" / "own")
    found = Recording.from_json((tmp_path / "runs" / "own" / "trace.json").read_text())
    assert repr(found) == repr(recording)
    assert json.loads((tmp_path / "runs" / "own" / "trace-chrome.json").read_text())["traceEvents"]
