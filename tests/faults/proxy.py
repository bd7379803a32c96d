"""A TCP proxy that a test can spoil: connections reset, delayed, throttled or cut, whatever speaks through them."""

import asyncio
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

__all__ = ["Proxy"]

_CHUNK_BYTES = 16 * 1024
# As much as lies in a network's buffers; then the sender is held back.
_MAX_CHUNKS = 64
_CONNECT_SECONDS = 5
# Closing a socket that lingers for no time sends a reset.
_RESET = struct.pack("ii", 1, 0)


class Proxy:
    """Listens on ``port`` and passes everything on to ``target``.

    Attributes:
        target: port on this machine; it may change while connections stand.
        delay_seconds: how much later each byte arrives, in each direction.
        bytes_per_second: of each connection, in each direction; None: no limit.
        damaged: words whose last byte is changed on its way from the target, and how often that still is to happen.
    """

    def __init__(self, port: int, target: int = 0) -> None:
        self.port = port
        self.target = target
        self.delay_seconds = 0.0
        self.bytes_per_second: float | None = None
        self.damaged: dict[bytes, float] = {}
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._links: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await self.reset()

    @property
    def connections(self) -> int:
        return len(self._links)

    async def reset(self) -> int:
        """Breaks every connection off, with a reset to both sides; returns how many."""
        links = set(self._links)
        for link in links:
            link.cancel()
        if links:
            await asyncio.wait(links)
        return len(links)

    def cut(self) -> None:
        """Nothing passes any more, and nobody is told."""
        self._flowing.clear()

    def repair(self) -> None:
        """All as it should be; what was under way arrives."""
        self.delay_seconds, self.bytes_per_second = 0.0, None
        self.damaged.clear()
        self._flowing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._links.add(task)
        task.add_done_callback(self._links.discard)
        with suppress(asyncio.CancelledError):  # asyncio's own callback would complain
            await self._link(reader, writer)

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._flowing.wait()
            async with asyncio.timeout(_CONNECT_SECONDS):
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except (OSError, TimeoutError, asyncio.CancelledError):
            _break_off(writer)
            return
        ways = [
            asyncio.create_task(self._carry(reader, far_writer, lambda chunk: chunk)),
            asyncio.create_task(self._carry(far_reader, writer, _Damage(self.damaged).apply)),
        ]
        broken = True
        try:
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            broken = any(way.exception() is not None for way in done)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for side in (writer, far_writer):
                if broken:
                    _break_off(side)
                else:
                    side.close()

    async def _carry(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        change: Callable[[bytes], bytes],
    ) -> None:
        """One direction; returns at its end, with everything before it carried."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MAX_CHUNKS)
        delivering = asyncio.create_task(self._deliver(under_way, writer))
        try:
            while chunk := await reader.read(_CHUNK_BYTES):
                await under_way.put((time.monotonic() + self.delay_seconds, change(chunk)))
            await under_way.put((0.0, b""))
            await delivering
        finally:
            delivering.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await delivering

    async def _deliver(
        self, under_way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        while True:
            due, chunk = await under_way.get()
            if not chunk:
                return
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if self.bytes_per_second is not None:
                await asyncio.sleep(len(chunk) / self.bytes_per_second)
            await self._flowing.wait()
            writer.write(chunk)
            await writer.drain()


class _Damage:
    """Of one connection: a word may come in two chunks."""

    def __init__(self, words: dict[bytes, float]) -> None:
        self._words = words
        self._before = b""

    def apply(self, chunk: bytes) -> bytes:
        known = len(self._before)
        seen = self._before + chunk
        changed = bytearray(chunk)
        for word in self._words:
            at = seen.find(word)
            while at >= 0 and self._words[word] > 0:
                last = at + len(word) - 1 - known
                if last >= 0:
                    changed[last] ^= 0x01
                    self._words[word] -= 1
                at = seen.find(word, at + 1)
        self._before = seen[-max(map(len, self._words), default=0) :] if self._words else b""
        return bytes(changed)


def _break_off(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
