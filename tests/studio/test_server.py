"""The studio: who is answered, what is inside its folders, and that names and logs are text."""

import http.client
import json
import threading

import pytest

from microparallel.errors import ConfigError
from microparallel.studio import Studio, site_of

EVIL = '<img src=x onerror="alert(1)">'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("studio")
    (folder / "secret.txt").write_text("secret")
    site = folder / "site"
    (site / "playground").mkdir(parents=True)
    (site / "index.html").write_text("<p>the course</p>")
    (site / "playground" / "index.html").write_text("the playground")
    (site / "link.txt").symlink_to(folder / "secret.txt")
    (site / "python.wasm").write_bytes(b"\0asm")
    for name in ("first", EVIL):
        run = folder / "runs" / name
        run.mkdir(parents=True)
        (run / "config.toml").write_text('model = "mlp"\n')
        (run / "metrics.jsonl").write_text(json.dumps({"step": 3, "loss": 0.5}) + "\n")
        (run / "rank0.log").write_text("<script>alert(1)</script>")
    (folder / "runs" / "broken").mkdir()
    (folder / "runs" / "broken" / "config.toml").write_text("model = ")
    (folder / "runs" / "no run").mkdir()
    return folder


@pytest.fixture(scope="module")
def studio(folder):
    with Studio(folder / "runs", folder / "site") as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


def ask(studio, path, method="GET", token=True, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", studio.port, timeout=10)
    address = f"{path}?token={studio.token}" if token else path
    connection.request(method, address, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer, text


def test_it_listens_on_this_machine_alone(studio):
    assert studio.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("path", ["/", "/runs/first/report", "/runs/first/files", "/anything"])
@pytest.mark.parametrize("given", ["", "?token=", "?token=wrong", "?token=é"])
def test_nothing_but_the_course_is_told_without_the_token(studio, path, given):
    answer, text = ask(studio, path + given.replace("é", "%C3%A9"), token=False)
    assert answer.status == 403
    assert "token" in text
    assert "first" not in text


def test_runs_are_listed_and_their_names_are_text(studio):
    answer, text = ask(studio, "/")
    assert answer.status == 200
    assert ">first</a>" in text
    assert "loss 0.5" in text
    assert "broken" in text and "is broken" in text
    assert "no run" not in text
    assert EVIL not in text
    assert "&lt;img" in text


def test_a_run_with_an_odd_name_has_its_report_and_its_files(studio):
    for what in ("report", "files"):
        answer, text = ask(studio, f"/runs/%3Cimg%20src%3Dx%20onerror%3D%22alert(1)%22%3E/{what}")
        assert answer.status == 200
        assert EVIL not in text
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "script-src" not in answer.headers["Content-Security-Policy"]  # there default-src 'none' holds


@pytest.mark.parametrize("name", ["..", "%2e%2e", "no%20run", "nothing", "..%2fsite", "first%2f..%2ffirst"])
def test_only_runs_that_are_listed_have_pages(studio, name):
    assert ask(studio, f"/runs/{name}/files")[0].status == 404


OUTSIDE = ["../secret.txt", "%2e%2e/secret.txt", "..%2fsecret.txt", "link.txt", "/etc/passwd", "%00"]


@pytest.mark.parametrize("path", [f"/site/{path}" for path in OUTSIDE])
def test_files_are_inside_of_the_site(studio, path):
    answer, text = ask(studio, path, token=False)
    assert answer.status == 404
    assert "secret" not in text


def test_the_course_needs_no_token_and_its_answers_say_what_pages_may_load(studio):
    answer, text = ask(studio, "/site/", token=False)
    assert (answer.status, text) == (200, "<p>the course</p>")
    assert "connect-src 'self'" in answer.headers["Content-Security-Policy"]
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert ask(studio, "/site/python.wasm", token=False)[0].headers["Content-Type"] == "application/wasm"
    again, _ = ask(studio, "/site/", token=False, If_None_Match=answer.headers["ETag"])
    assert again.status == 304


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "8.8.8.8:{port}", ""]
)
def test_other_names_are_refused(studio, host):
    for path in ("/", "/site/"):
        assert ask(studio, path, Host=host.format(port=studio.port))[0].status == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "https://127.0.0.1:{port}"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"},
        {"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "cors"},
    ],
)
def test_other_origins_are_refused(studio, headers):
    given = {name: value.format(port=studio.port) for name, value in headers.items()}
    assert ask(studio, "/", **given)[0].status == 403
    own = {"Origin": f"http://localhost:{studio.port}", "Host": f"localhost:{studio.port}"}
    assert ask(studio, "/", **own)[0].status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_it_only_reads(studio, method):
    assert ask(studio, "/", method=method)[0].status == 405
    assert ask(studio, "/", method="HEAD")[1] == ""


def test_without_a_built_course_it_says_how_to_build_it(folder, tmp_path):
    with Studio(tmp_path, None) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            assert "make docs" in ask(server, "/")[1]
            assert ask(server, "/site/index.html", token=False)[0].status == 404
        finally:
            server.shutdown()
            thread.join(10)
    with pytest.raises(ConfigError, match="no built course"):
        site_of(tmp_path)


def test_a_port_that_is_in_use_is_told_with_what_to_do(studio, folder):
    with pytest.raises(ConfigError, match="--port 0"):
        Studio(folder / "runs", None, port=studio.port)
