"""A headless Chromium that is spoken to over a pipe in its DevTools protocol: what the tests of the ranking page need
of a browser, without a driver or a library."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from select import select
from time import monotonic, sleep
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SECONDS = 20.0  # how long anything may take

KEYS = {"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Tab": 9}


def _high(descriptor: int) -> int:
    """The same under a number that is free in the browser too."""
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return high


class Browser:
    """The process. Tabs that share cookies are of one `person`."""

    def __init__(self, home: Path) -> None:
        assert CHROMIUM is not None
        to_browser, self._out = map(_high, os.pipe())
        self._in, from_browser = map(_high, os.pipe())
        words = [
            CHROMIUM, "--headless=new", "--no-sandbox", "--remote-debugging-pipe", f"--user-data-dir={home}",
            "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
            "--disable-extensions", "--force-prefers-reduced-motion",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, pass_fds=(3, 4),
            preexec_fn=lambda: (os.dup2(to_browser, 3), os.dup2(from_browser, 4)),  # where it reads, and writes
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._number = 0
        self._rest = b""
        self.events: list[dict[str, Any]] = []

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def tell(self, method: str, session: str | None = None, **values: Any) -> dict[str, Any]:
        """Send a command and wait for what comes back."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": values}
        if session is not None:
            command["sessionId"] = session
        data = json.dumps(command).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        while (message := self._read()).get("id") != self._number:
            self.events.append(message)
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']['message']}")
        result: dict[str, Any] = message["result"]
        return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select([self._in], [], [], SECONDS)[0]:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._in, 1 << 20)
            if not data:
                raise RuntimeError("the browser is gone")
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def person(self) -> str:
        """Somebody with cookies of their own."""
        return str(self.tell("Target.createBrowserContext")["browserContextId"])

    def tab(self, person: str) -> "Tab":
        target = self.tell("Target.createTarget", url="about:blank", browserContextId=person)["targetId"]
        session = self.tell("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Tab(self, session)


class Tab:
    """One page. What is done to it is done as by hand: by mouse and keys."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.tell("Page.enable")
        self.tell("Runtime.enable")
        self.resize(1280, 900)

    def tell(self, method: str, **values: Any) -> dict[str, Any]:
        return self._browser.tell(method, self._session, **values)

    def resize(self, width: int, height: int, touch: bool = False) -> None:
        self.tell("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=touch)
        self.tell("Emulation.setTouchEmulationEnabled", enabled=touch)

    def media(self, **features: str) -> None:
        wanted = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.tell("Emulation.setEmulatedMedia", features=wanted)

    def scripts(self, allowed: bool) -> None:
        self.tell("Emulation.setScriptExecutionDisabled", value=not allowed)

    def go(self, url: str) -> None:
        self.act(lambda: self.tell("Page.navigate", url=url))

    def act(self, what: Callable[[], object]) -> None:
        """Do something that leads to another page, and wait until that is there."""
        self.run("window.here = true")
        what()
        self.wait("!window.here && document.readyState === 'complete'")

    def run(self, code: str) -> Any:
        """The value of an expression."""
        answer = self.tell("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{code}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, code: str) -> None:
        """Until an expression is true."""
        end = monotonic() + SECONDS
        while True:
            try:
                if self.run(code):
                    return
            except RuntimeError:  # between two pages
                pass
            if monotonic() > end:
                raise TimeoutError(f"never true: {code}; the page says {self.run('document.body.innerText')!r}")
            sleep(0.01)

    def text(self, selector: str = "body") -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def key(self, key: str, code: str = "") -> None:
        """By what it writes; `code` says where it is, on keyboards that write something else there."""
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        number = KEYS.get(key, ord(key.upper()) if len(key) == 1 else 0)
        named = {"key": key, "code": code, "windowsVirtualKeyCode": number}
        self.tell("Input.dispatchKeyEvent", type="keyDown", text=text, **named)
        self.tell("Input.dispatchKeyEvent", type="keyUp", **named)

    def type(self, text: str) -> None:
        self.tell("Input.insertText", text=text)

    def middle(self, selector: str, share: float = 0.5) -> tuple[float, float]:
        """Where an element is that is in sight, `share` of its height from its top."""
        found = self.run(
            f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            f" return [b.x + b.width / 2, b.y + b.height * {share}]; }})()"
        )
        return found[0], found[1]

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        x, y = self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.tell("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def drag(self, selector: str, to: str, share: float = 0.5) -> None:
        """From the middle of one element onto another, with the browser's own drag and drop."""
        x, y = self.middle(selector)
        self.tell("Input.setInterceptDrags", enabled=True)
        self.tell("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, button="left", clickCount=1)
        self._browser.events.clear()
        for step in (4, 8, 12):
            self.tell("Input.dispatchMouseEvent", type="mouseMoved", x=x + step, y=y + step, button="left", buttons=1)
        data = self._dragged()
        x, y = self.middle(to, share)
        for kind in ("dragEnter", "dragOver", "dragOver", "drop"):
            self.tell("Input.dispatchDragEvent", type=kind, x=x, y=y, data=data)
        self.tell("Input.dispatchMouseEvent", type="mouseReleased", x=x, y=y, button="left", clickCount=1)
        self.tell("Input.setInterceptDrags", enabled=False)

    def _dragged(self) -> dict[str, Any]:
        end = monotonic() + SECONDS
        while monotonic() < end:
            for event in self._browser.events:
                if event.get("method") == "Input.dragIntercepted":
                    data: dict[str, Any] = event["params"]["data"]
                    return data
            self.run("1")
        raise TimeoutError("nothing was dragged")
