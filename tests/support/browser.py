"""Pages in headless Chromium, through its DevTools protocol over a pipe: what a page logs, requests and shows."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
HEIGHT = 900  # of the window, pixels
PATIENCE = 60.0  # seconds for an answer
SWITCHES = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"),
    *("--hide-scrollbars", "--no-first-run", "--disable-extensions"),
    *("--disable-background-networking", "--disable-component-update"),
)
MEASURE = """(async () => {
  for (const element of document.querySelectorAll("details")) element.open = true;
  await Promise.all([...document.images].map(image => image.decode().catch(() => null)));
  return {
    cut: Math.max(0, ...[...document.querySelectorAll(".scroll")].map(one => one.scrollWidth - one.clientWidth)),
    sideways: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    height: document.documentElement.scrollHeight,
    images: [...document.images].map(image => {
      const box = image.getBoundingClientRect();
      return [image.complete ? image.naturalWidth : 0, image.naturalHeight, box.width, box.height, box.top];
    }),
  };
})()"""


def find() -> str | None:
    """The Chromium that is installed, if there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@dataclass
class Seen:
    """What a page did and how it looks.

    Attributes:
        complaints: errors, warnings and exceptions on its console.
        requests: addresses that it asked for, other than its own and `data:`.
        sideways: pixels by which it is wider than the window.
        cut: pixels by which a table or a chart is wider than what it scrolls in, at most.
        images: of each its natural width and height, which are 0 for a broken image, those on the page, and its top.
        png: a screenshot of all of it.
    """

    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    sideways: int = 0
    cut: int = 0
    images: list[list[float]] = field(default_factory=list)
    png: bytes = b""


class Browser:
    """A browser that runs within a `with` block."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        self._home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        reads, self._out = os.pipe()
        self._in, writes = os.pipe()
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, 64) for end in (reads, writes)]  # far from those that it wants
        # Chromium reads commands from descriptor 3 and answers on 4
        words = [self._program, *SWITCHES, f"--user-data-dir={self._home.name}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{high[0]} 4>&{high[1]}', "bash", *words],
            pass_fds=high, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": self._home.name},
        )  # fmt: skip
        for end in (reads, writes, *high):
            os.close(end)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)  # it ends when nobody can give it commands
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        self._home.cleanup()

    def open(self, page: Path, width: int) -> Seen:
        """Open a page in a window of so many pixels, and look at all of it."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable", session)
        size = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", session, **size)
        self._events.clear()
        self._call("Page.navigate", session, url=page.resolve().as_uri())
        self._wait_for("Page.loadEventFired", session)
        value = self._call("Runtime.evaluate", session, expression=MEASURE, awaitPromise=True, returnByValue=True)
        looks = value["result"]["value"]
        clip = {"x": 0, "y": 0, "width": width, "height": looks["height"], "scale": 1}
        shot = self._call("Page.captureScreenshot", session, captureBeyondViewport=True, clip=clip)
        seen = Seen(
            sideways=looks["sideways"], cut=looks["cut"], images=looks["images"], png=base64.b64decode(shot["data"])
        )
        for event in self._events:
            if event.get("sessionId") == session:
                _note(seen, event["method"], event["params"], page.resolve().as_uri())
        self._call("Target.closeTarget", targetId=target)
        return seen

    def _call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._events.append(answer)

    def _wait_for(self, method: str, session: str) -> None:
        while not any(one["method"] == method and one.get("sessionId") == session for one in self._events):
            self._events.append(self._read())

    def _read(self) -> dict[str, Any]:
        """The next message, which ends with a zero."""
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(end - time.monotonic(), 0))
            part = os.read(self._in, 1 << 20) if ready else b""
            if not part:
                raise RuntimeError(f"{self._program} {'ended' if ready else 'does not answer'}")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


def _note(seen: Seen, method: str, params: dict[str, Any], own: str) -> None:
    """Remember an event if it is a complaint or a request."""
    if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
        seen.complaints.append(" ".join(str(one.get("value", one.get("description"))) for one in params["args"]))
    elif method == "Runtime.exceptionThrown":
        details = params["exceptionDetails"]
        seen.complaints.append(details.get("exception", {}).get("description", details["text"]))
    elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
        seen.complaints.append(params["entry"]["text"])
    elif method == "Network.requestWillBeSent":
        url = params["request"]["url"]
        if url != own and not url.startswith("data:"):
            seen.requests.append(url)
