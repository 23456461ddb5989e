"""A server of made-up runs, and a headless Chromium that clicks; it is spoken to over a pipe, by the DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from respec.config import parse_config
from respec.report.dash.app import make_app
from respec.report.dash.runs import Runs
from respec.report.dash.serve import bound
from respec.report.run_dir import RunDir

WAIT_S = 60.0
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync "
    "--remote-debugging-pipe"
)


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """`make_run(name, steps, planned, **metrics)`: a run that was stopped, or finished where it did all its steps."""

    def make(name: str, steps: int = 6, planned: int = 6, sets: dict | None = None, **metrics: float) -> Path:
        tree: dict[str, Any] = {
            "run": {"dir": str(tmp_path / "runs" / name), "steps": planned, "threads": 1},
            "model": {"path": "builtin:demo"}, "task": {"dataset": "chain_sum"}, "tracking": {"to": []},
        } | (sets or {})  # fmt: skip
        with RunDir(parse_config(tree)) as run:
            for step in range(steps + 1):
                run.write_step(step, metrics_of(step, metrics))
            if steps >= planned:
                run.write_summary({"finished": True})
        return run.path

    return make


def metrics_of(step: int, more: dict[str, float]) -> dict[str, float]:
    if step == 0:
        return {"eval/accuracy": 0.25, "eval/se": 0.02, "time/step_s": 5.0}
    return {
        "reward/mean": step / 10, "rollout/tokens_per_s": 1000.0 + step, "rollout/accepted_length": 2.0,
        "policy/entropy": 0.3, "time/step_s": 3600.0, **more,
    }  # fmt: skip


class Served:
    """The application on a port of its own, in a thread."""

    def __init__(self, *roots: Path):
        self._socket = bound(0)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server = uvicorn.Server(uvicorn.Config(make_app(Runs(roots)), log_level="warning"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        got = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        connection.close()
        return got

    def json(self, path: str) -> Any:
        status, _, body = self.ask(path)
        assert status == 200, body
        return json.loads(body)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(WAIT_S)
        self._socket.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    with contextlib.ExitStack() as stack:

        def start(*roots: Path) -> Served:
            served = Served(*roots)
            stack.callback(served.close)
            return served

        yield start


class Browser:
    """One page. `requests`: every address it asked for; `complaints`: errors in its console."""

    def __init__(self, profile: Path):
        to_us, from_us = os.pipe(), os.pipe()
        # Chromium reads commands at 3 and writes at 4
        command = f"exec chromium {FLAGS} --user-data-dir='{profile}' about:blank 3<&{from_us[0]} 4>&{to_us[1]}"
        self._process = subprocess.Popen(
            ["bash", "-c", command],
            pass_fds=(from_us[0], to_us[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(from_us[0])
        os.close(to_us[1])
        self._in, self._out = os.fdopen(to_us[0], "rb"), os.fdopen(from_us[1], "wb")
        self._number, self._session = 0, ""
        self.requests: list[str] = []
        self.complaints: list[str] = []
        # the page that it began with, since one that is opened beside it may be hidden
        target = next(page for page in self._pages() if page["type"] == "page")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")
        self._call("Page.bringToFront")

    def _pages(self) -> list[dict[str, Any]]:
        deadline = time.monotonic() + WAIT_S
        while not (pages := self._call("Target.getTargets")["targetInfos"]):
            assert time.monotonic() < deadline, "Chromium opened no page"
        return pages

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        parts = bytearray()
        while (byte := self._in.read(1)) != b"\0":
            assert byte, "Chromium ended"
            parts += byte
        answer = json.loads(parts)
        method, parameters = answer.get("method"), answer.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.complaints.append(parameters["entry"]["text"])
        return answer

    def open(self, url: str, width: int = 1200, height: int = 900) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self._call("Page.navigate", url=url)

    def js(self, expression: str) -> Any:
        result = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, expression: str) -> Any:
        """Its value, once that is true."""
        deadline = time.monotonic() + WAIT_S
        while not (value := self.js(f"(() => {{ try {{ return {expression}; }} catch {{ return null; }} }})()")):
            assert time.monotonic() < deadline, (
                f"never: {expression}; the page: {self.js('document.body.innerText')[:2000]}"
            )
            time.sleep(0.1)
        return value

    def click(self, selector: str) -> None:
        """A mouse's click in the middle of the element."""
        self.drag(selector, 0.5, 0.5)

    def drag(self, selector: str, start: float, end: float) -> None:
        """Presses at `start` of its width, half of its height, and lets go at `end`."""
        box = self.until(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)}); node.scrollIntoView({{ block: 'center', behavior: 'instant' }}); "
            "const box = node.getBoundingClientRect(); return [box.x, box.y, box.width, box.height]; })()"
        )
        places = [{"x": box[0] + share * box[2], "y": box[1] + box[3] / 2} for share in (start, (start + end) / 2, end)]
        button = {"button": "left", "clickCount": 1}
        self._call("Input.dispatchMouseEvent", type="mouseMoved", **places[0])
        self._call("Input.dispatchMouseEvent", type="mousePressed", **places[0], **button)
        if start != end:
            for place in places[1:]:
                self._call("Input.dispatchMouseEvent", type="mouseMoved", **place, button="left", buttons=1)
                time.sleep(0.1)
        self._call("Input.dispatchMouseEvent", type="mouseReleased", **places[2], **button)

    def type(self, text: str) -> None:
        self._call("Input.insertText", text=text)

    def picture(self, path: Path, height: int | None = None) -> None:
        area = (
            {"clip": {"x": 0, "y": 0, "width": self.js("innerWidth"), "height": height, "scale": 1}} if height else {}
        )
        shot = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=bool(height), **area)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self._out.close()
        self._process.terminate()
        self._process.wait(WAIT_S)
        self._in.close()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if not shutil.which("chromium"):
        pytest.skip("needs a Chromium to click in")
    browser = Browser(tmp_path / "browser")
    yield browser
    browser.close()
