"""A real browser without a window, for pages as people see them: Debian's Chromium, by its DevTools protocol."""

import asyncio
import base64
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Self

import aiohttp

__all__ = ["Browser", "BrowserUnavailable", "Tab"]

_PROGRAMS: Final = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_START_SECONDS: Final = 30
_TIMEOUT_SECONDS: Final = 20


class BrowserUnavailable(Exception):
    """There is no browser on this machine."""


class Tab:
    """A page in the browser.

    Attributes:
        requests: the address of each request since the page was opened.
        messages: errors and warnings: of scripts, of the page's policy, of the network.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = count(1)
        self._answers: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self.requests: list[str] = []
        self.messages: list[str] = []

    async def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open an address, and wait until it is loaded.

        Args:
            url: the address.
            width: of the window, in pixels.
            height: likewise.
            dark: whether its user prefers dark pages.
        """
        for domain in ("Page", "Network", "Runtime", "Log"):
            await self._call(f"{domain}.enable")
        await self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self._call("Emulation.setEmulatedMedia", features=[scheme])
        await self._call("Emulation.setScrollbarsHidden", hidden=True)
        self._loaded.clear()
        await self._call("Page.navigate", url=url)
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            await self._loaded.wait()

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, or of the promise that it returns."""
        found = await self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, condition: str, *, seconds: float = _TIMEOUT_SECONDS) -> None:
        """Wait until a JavaScript expression is true; the page may be loaded again meanwhile."""
        async with asyncio.timeout(seconds):
            while True:
                with suppress(RuntimeError):
                    if await self.evaluate(condition):
                        return
                await asyncio.sleep(0.1)

    async def screenshot(self) -> bytes:
        """The whole page as PNG."""
        found = await self._call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(found["data"])

    async def read(self) -> None:
        """Read what the browser sends, until it ends."""
        async for message in self._socket:
            content = json.loads(message.data)
            if "id" in content:
                answer = self._answers.pop(content["id"])
                if "error" in content:
                    answer.set_exception(RuntimeError(str(content["error"])))
                else:
                    answer.set_result(content["result"])
            else:
                self._note(content["method"], content["params"])

    def _note(self, method: str, params: Mapping[str, Any]) -> None:
        match method:
            case "Page.loadEventFired":
                self._loaded.set()
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Log.entryAdded" if params["entry"]["level"] in {"error", "warning"}:
                self.messages.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Runtime.exceptionThrown":
                self.messages.append(str(params["exceptionDetails"]))

    async def _call(self, method: str, **params: Any) -> Mapping[str, Any]:
        number = next(self._ids)
        answer: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        await self._socket.send_str(json.dumps({"id": number, "method": method, "params": params}))
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            await answer
        return answer.result()


class Browser:
    """A browser's process, with a profile of its own. It reaches this machine and nothing else.

    Raises:
        BrowserUnavailable: there is none on this machine.
    """

    def __init__(self) -> None:
        program = next((found for name in _PROGRAMS if (found := shutil.which(name))), None)
        if program is None:
            raise BrowserUnavailable("no Chromium is installed")
        self._program = program
        self._profile = TemporaryDirectory(prefix="anabranch-browser-", ignore_cleanup_errors=True)
        self._log_file = Path(self._profile.name) / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self._log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    self._program,
                    *("--headless", "--remote-debugging-port=0", f"--user-data-dir={self._profile.name}"),
                    "--no-sandbox",  # as root, in CI
                    *("--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"),
                    *("--no-first-run", "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"),
                    "about:blank",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Debian's program is a script that starts another process
            )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._profile.cleanup()

    @asynccontextmanager
    async def tab(self) -> AsyncIterator[Tab]:
        """A new page, which is closed at the end."""
        port = await self._port()
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            async with session.put("/json/new?about:blank") as response:
                target = await response.json(content_type=None)
            path = target["webSocketDebuggerUrl"].partition(str(port))[2]
            async with session.ws_connect(path, max_msg_size=0) as socket:
                tab = Tab(socket)
                reading = asyncio.create_task(tab.read())
                try:
                    yield tab
                finally:
                    async with session.get(f"/json/close/{target['id']}"):
                        pass
                    await reading

    async def _port(self) -> int:
        """Where it listens for the protocol, as it writes it into its profile."""
        file = Path(self._profile.name) / "DevToolsActivePort"
        async with asyncio.timeout(_START_SECONDS):
            while not file.is_file() or not file.read_text():
                assert self._process is not None
                assert self._process.poll() is None, self._log_file.read_text(errors="replace")
                await asyncio.sleep(0.05)
        return int(file.read_text().split()[0])
