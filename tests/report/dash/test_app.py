"""The live page's server, asked over a socket: what it answers, and what it does not."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from respec.errors import ConfigError
from respec.report.dash.runs import MOST_COMPARED
from respec.report.dash.serve import bound
from respec.report.dash.serve import serve as serve_until_stopped
from respec.report.records import METRICS_FILE

Run = Callable[..., Path]
Serve = Callable[..., Any]


def test_it_lists_runs_and_tells_of_those_that_cannot_be_read(make_run: Run, serve: Serve, tmp_path: Path) -> None:
    make_run("good", 6, 6)
    (make_run("bad") / METRICS_FILE).write_text("nonsense\n{}\n")
    rows = {row["key"]: row for row in serve(tmp_path / "runs").json("/api/runs")["rows"]}
    assert rows["good"]["state"] == "finished" and rows["good"]["step"] == 6
    assert rows["bad"]["state"] == "unreadable" and "damaged" in rows["bad"]["detail"]


def test_a_run_that_begins_while_it_serves_appears(
    make_run: Run, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("respec.report.dash.runs.SEARCH_S", 0.0)
    (tmp_path / "runs").mkdir()
    served = serve(tmp_path / "runs")
    assert served.json("/api/runs")["rows"] == []
    make_run("new")
    assert [row["key"] for row in served.json("/api/runs")["rows"]] == ["new"]


def test_what_is_known_already_is_not_sent_again(make_run: Run, serve: Serve, tmp_path: Path) -> None:
    path = make_run("run", 3, 9)
    served = serve(tmp_path / "runs")
    for address in ("/api/runs", "/api/run/run", "/api/compare?run=run&metric=reward/mean", "/static/page.js"):
        status, headers, _ = served.ask(address)
        assert status == 200
        assert served.ask(address, **{"If-None-Match": headers["etag"]})[0::2] == (304, b"")
    tag = served.ask("/api/run/run")[1]["etag"]
    with (path / METRICS_FILE).open("a") as file:
        file.write('{"step": 4, "time": 0, "reward/mean": 1.0}\n')
    assert served.ask("/api/run/run", **{"If-None-Match": tag})[0] == 200
    assert served.json("/api/run/run")["last_step"] == 4


def test_comparison_gives_lines_and_the_settings_that_differ(make_run: Run, serve: Serve, tmp_path: Path) -> None:
    make_run("a")
    make_run("b", sets={"speculation": {"drafter": "off"}})
    answer = serve(tmp_path / "runs").json("/api/compare?run=a&run=b&run=nobody&metric=reward/mean&metric=no/such")
    assert [run["key"] for run in answer["runs"]] == ["a", "b"]
    assert answer["runs"][0]["lines"]["reward/mean"]["value"] == [step / 10 for step in range(1, 7)]
    assert answer["differing"] == [{"setting": "speculation.drafter", "value": ["auto", "off"]}]


def test_a_comparison_is_bounded(make_run: Run, serve: Serve, tmp_path: Path) -> None:
    for number in range(MOST_COMPARED + 2):
        make_run(f"run{number}", 1)
    query = "&".join(f"run=run{number}" for number in range(MOST_COMPARED + 2))
    assert len(serve(tmp_path / "runs").json(f"/api/compare?{query}")["runs"]) == MOST_COMPARED


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "localhost.evil.example:1",
        "",
        "[::1].evil",
        "localhost:80:80",
    ],
)
def test_a_name_that_is_not_this_machines_is_refused(serve: Serve, tmp_path: Path, host: str) -> None:
    status, headers, body = serve(tmp_path).ask("/api/runs", Host=host)
    assert status == 421 and b"rows" not in body and "content-security-policy" in headers


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9000", "[::1]:80", "[::1]"])
def test_this_machines_names_are_answered(serve: Serve, tmp_path: Path, host: str) -> None:
    assert serve(tmp_path).ask("/api/runs", Host=host)[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/run/../../secret", "/run/%2e%2e/%2e%2e/secret", "/api/run/../secret", "/api/run/..%2fsecret", "/api/run//etc", "/api/run/run/../../secret",
        "/static/../html.py", "/static/html.py", "/static/dash/app.py", "/static/%2e%2e/config.toml", "/static//etc/passwd", "/api/run/nobody", "/secret",
    ],
)  # fmt: skip
def test_nothing_but_the_runs_can_be_reached(make_run: Run, serve: Serve, tmp_path: Path, path: str) -> None:
    make_run("run")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "config.toml").write_text("secret = true")
    status, _, body = serve(tmp_path / "runs").ask(path)
    assert status == 404 and b"secret =" not in body and b"import" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/run/run", "/run/run", "/static/page.js"])
def test_nothing_can_be_written(make_run: Run, serve: Serve, tmp_path: Path, method: str, path: str) -> None:
    make_run("run")
    assert serve(tmp_path / "runs").ask(path, method)[0] == 405


def test_pages_run_their_own_scripts_alone(make_run: Run, serve: Serve, tmp_path: Path) -> None:
    make_run("run & <b>")
    served = serve(tmp_path / "runs")
    for path in ("/", "/run/run%20&%20%3Cb%3E"):
        status, headers, body = served.ask(path)
        text = body.decode()
        assert status == 200 and "script-src 'self';" in headers["content-security-policy"]
        assert (
            not re.search(r"<script>|<script[^>]*>[^<]|\son\w+=|<style", text)
            and "<b>" not in text.partition("<body")[0]
        )
        for address in re.findall(r'(?:src|href)="([^"]*)"', text):
            if address == "data:,":
                continue
            assert address.startswith("/") and not address.startswith("//") and served.ask(address)[0] == 200


def test_a_port_that_is_taken_and_a_folder_that_is_not_there_are_errors(tmp_path: Path) -> None:
    with bound(0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} cannot be used .* --port 0"):
            bound(port)
    with pytest.raises(ConfigError, match="there is no folder"):
        serve_until_stopped([tmp_path / "nowhere"], 0, print)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_this_machine_until_it_is_stopped(
    make_run: Run, tmp_path: Path, stop: signal.Signals
) -> None:
    make_run("run")
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from respec.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "dash", str(tmp_path / "runs"), "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    match = re.match(r"http://127\.0\.0\.1:(\d+)", line)
    assert match, (line, process.stderr and process.stderr.read())
    with socket.create_connection(("127.0.0.1", int(match[1])), timeout=30) as there:
        there.sendall(b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert there.recv(100).startswith(b"HTTP/1.1 200")
    process.send_signal(stop)
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err
