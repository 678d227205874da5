"""The studio's server: who may ask for what.

| path                  | what                             | who                                                       |
|-----------------------|----------------------------------|-----------------------------------------------------------|
| `/site/…`             | a file of the built course       | whoever can reach the address, under its name             |
| `/?token=…`           | the list of runs                 | who has the token of the address that is printed          |
| `/runs/NAME/report`   | a run's report, made when asked  | the same                                                  |
| `/runs/NAME/files`    | its settings and logs, as text   | the same                                                  |

- It listens on 127.0.0.1 alone, unless it is told another address.
- A request must name the server as its user would (`Host`): another name means that somebody else's name leads here. A
  page of another origin is refused (`Origin`, `Sec-Fetch-Site`), and no page may put one of these into a frame.
- It only reads: GET and HEAD. A file is inside the site's folder, also behind links; a run is one of those listed.
- Every answer says what its page may load: nothing from elsewhere.
"""

from __future__ import annotations

import hmac
import ipaddress
import mimetypes
import os
import secrets
import socket
import urllib.parse
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from microparallel import __version__
from microparallel.errors import ConfigError, MicroparallelError
from microparallel.reporting import read_run, report_page
from microparallel.studio.pages import files_page, home, runs_in

LOOPBACK = "127.0.0.1"
_OWN_PAGE = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_REPORT = f"{_OWN_PAGE}; script-src 'unsafe-inline'"
_SITE = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'wasm-unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self' data: blob:; worker-src 'self' blob:; object-src 'none'; "
    "base-uri 'self'; form-action 'none'; frame-ancestors 'self'"
)
_ALWAYS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # an address has a token
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_TYPES = {".mjs": "text/javascript", ".js": "text/javascript", ".wasm": "application/wasm", ".svg": "image/svg+xml"}
_PATIENCE = 30  # seconds that a slow client may take


def site_of(given: Path | None) -> Path | None:
    """The folder of the built course: the one that is named, or where `make docs` puts it; None if it is not built."""
    if given is not None:
        if not (given / "index.html").is_file():
            raise ConfigError(f"--site {given}: no built course is there; `make docs` in a checkout makes site/")
        return given
    places = (Path("site"), Path(__file__).parents[3] / "site", Path(__file__).parent / "site")
    return next((place for place in places if (place / "playground" / "index.html").is_file()), None)


class Studio(ThreadingHTTPServer):
    """The server; `serve_forever` runs it, and `address` is what to open."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, runs: Path, site: Path | None, host: str = LOOPBACK, port: int = 0) -> None:
        self.runs, self.site = runs, None if site is None else site.resolve()
        self.token = secrets.token_urlsafe(24)
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            hint = "--port 0 takes a free one" if port else "--host names an address of this machine"
            raise ConfigError(f"--host {host} --port {port}: {error.strerror or error}; {hint}") from None
        self.port = self.server_port
        self._anywhere = host in ("", "0.0.0.0")
        self._names = {host, LOOPBACK, "localhost"} if self._anywhere or _is_loopback(host) else {host}
        self._names |= {socket.gethostname()} if self._anywhere else set()
        self.host = LOOPBACK if self._anywhere else host

    @property
    def address(self) -> str:
        """The address of the first page, with the token."""
        return f"http://{self.host}:{self.port}/?token={self.token}"

    def is_me(self, host: str) -> bool:
        """Whether a request's Host is a name of this server. Names that others own cannot be numbers."""
        name, _, port = host.rpartition(":")
        if not name or port != str(self.port):
            return False
        return name in self._names or (self._anywhere and _is_number(name))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error of the server's."""


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_number(host) and ipaddress.ip_address(host).is_loopback)


def _is_number(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Studio
    timeout = _PATIENCE
    server_version, sys_version = "microparallel", ""
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _refuse_method(self) -> None:
        self.close_connection = True
        self._say(HTTPStatus.METHOD_NOT_ALLOWED, "The studio only reads.")

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_CONNECT = do_TRACE = _refuse_method

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing is printed: an address has a token."""

    def _answer(self) -> None:
        if not self.server.is_me(self.headers.get("Host", "")):
            self._say(HTTPStatus.FORBIDDEN, "This server is not known under that name.")
            return
        origin, site = self.headers.get("Origin"), self.headers.get("Sec-Fetch-Site")
        followed = self.headers.get("Sec-Fetch-Mode") == "navigate"  # a link that a person has followed
        foreign = site in ("cross-site", "same-site") and not followed
        if foreign or (origin is not None and not self._is_own(origin)):
            self._say(HTTPStatus.FORBIDDEN, "Pages of other origins are not answered.")
            return
        path, _, query = self.path.partition("?")
        if path.startswith("/site/") or path == "/site":
            self._static(path.removeprefix("/site").lstrip("/"))
            return
        given = urllib.parse.parse_qs(query).get("token", [""])[-1]
        if not hmac.compare_digest(given.encode(), self.server.token.encode()):
            self._say(HTTPStatus.FORBIDDEN, "Open the address that `microparallel studio` has printed: it has a token.")
            return
        self._dynamic(path)

    def _is_own(self, origin: str) -> bool:
        scheme, _, host = origin.partition("://")
        return scheme == "http" and self.server.is_me(host)

    # ── the course ──────────────────────────────────────────────────────────────────────────────────────────────

    def _static(self, asked: str) -> None:
        site = self.server.site
        if site is None:
            self._say(HTTPStatus.NOT_FOUND, "The course is not built here; `make docs` builds it.")
            return
        name = urllib.parse.unquote(asked) or "index.html"
        file = Path(os.path.realpath(site / name)) if "\0" not in name else site / "?"
        if file.is_dir():
            file /= "index.html"
        if not file.is_relative_to(site) or not file.is_file():
            self._say(HTTPStatus.NOT_FOUND, "There is no such page.")
            return
        kind = _TYPES.get(file.suffix) or mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        stamp = file.stat()
        tag = f'"{stamp.st_mtime_ns:x}-{stamp.st_size:x}"'
        if self.headers.get("If-None-Match") == tag:
            self._begin(HTTPStatus.NOT_MODIFIED, None, _SITE, 0, {"ETag": tag, "Cache-Control": "no-cache"})
            return
        content = file.read_bytes()
        text = f"{kind}; charset=utf-8" if kind.startswith("text/") else kind
        self._begin(HTTPStatus.OK, text, _SITE, len(content), {"ETag": tag, "Cache-Control": "no-cache"})
        self._write(content)

    # ── runs ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _dynamic(self, path: str) -> None:
        runs = self.server.runs
        if path == "/":
            self._page(home(runs, self.server.site, self._with_token), _OWN_PAGE)
            return
        parts = path.split("/")
        if len(parts) == 4 and parts[1] == "runs" and parts[3] in ("report", "files"):
            name = os.fsdecode(urllib.parse.unquote_to_bytes(parts[2]))
            if name in runs_in(runs):
                self._run(runs, name, parts[3])
                return
        self._say(HTTPStatus.NOT_FOUND, "There is no such page.")

    def _run(self, runs: Path, name: str, what: str) -> None:
        try:
            if what == "files":
                self._page(files_page(runs, name, self._with_token), _OWN_PAGE)
            else:
                self._page(report_page(read_run(runs / name), __version__), _REPORT)
        except (MicroparallelError, OSError) as error:
            self._say(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))

    def _with_token(self, path: str) -> str:
        return f"{path}?token={self.server.token}"

    # ── answers ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _page(self, text: str, policy: str) -> None:
        content = text.encode("utf-8", "replace")
        more = {"Cache-Control": "no-store"}
        self._begin(HTTPStatus.OK, "text/html; charset=utf-8", policy, len(content), more)
        self._write(content)

    def _say(self, status: HTTPStatus, words: str) -> None:
        content = f"{words}\n".encode("utf-8", "replace")
        self._begin(status, "text/plain; charset=utf-8", _OWN_PAGE, len(content), {"Cache-Control": "no-store"})
        self._write(content)

    def _begin(self, status: HTTPStatus, kind: str | None, policy: str, length: int, more: dict[str, str]) -> None:
        self.send_response(status)
        if kind is not None:
            self.send_header("Content-Type", kind)
        for name, value in {**_ALWAYS, "Content-Security-Policy": policy, **more}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def _write(self, content: bytes) -> None:
        if self.command != "HEAD":
            self.wfile.write(content)
