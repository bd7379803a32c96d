"""A client for synchronous code, and for coroutines of any event loop."""

import asyncio
import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, Unpack

from streams.client import Client, ClientClosed, Embedding, QueryOptions, RetrievalResult

__all__ = ["SharedClient"]


class SharedClient:
    """Runs a client on an event loop of its own, in a thread that starts with the first question.

    Any number of threads and event loops may use it at the same time: a web server has one for all its requests. A
    context manager; leaving it closes the client. One that is not closed is closed with the process.

    Args:
        client: the client, not used before, and by nothing else.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: weakref.finalize[..., SharedClient] | None = None
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the client. Calls that wait raise `ClientClosed`."""
        with self._lock:
            self._is_closed = True
        if self._stop is not None:
            self._stop()

    def retrieve(
        self,
        *,
        principals: Iterable[str],
        embedding: Embedding | None = None,
        text: str | None = None,
        timeout: float = 30.0,
        **options: Unpack[QueryOptions],
    ) -> RetrievalResult:
        """As `Client.retrieve`, but blocks the calling thread. A running event loop in that thread does not matter."""
        call = self._submit(principals=principals, embedding=embedding, text=text, timeout=timeout, **options)
        try:
            return call.result()
        except BaseException:
            call.cancel()
            raise

    async def aretrieve(
        self,
        *,
        principals: Iterable[str],
        embedding: Embedding | None = None,
        text: str | None = None,
        timeout: float = 30.0,  # noqa: ASYNC109  # as `Client.retrieve`
        **options: Unpack[QueryOptions],
    ) -> RetrievalResult:
        """As `Client.retrieve`, in any event loop."""
        call = self._submit(principals=principals, embedding=embedding, text=text, timeout=timeout, **options)
        return await asyncio.wrap_future(call)

    def _submit(self, **arguments: Any) -> Future[RetrievalResult]:
        with self._lock:
            if self._is_closed:
                raise ClientClosed("the client is closed")
            if self._loop is None:
                self._loop = self._start()
            return asyncio.run_coroutine_threadsafe(self._client.retrieve(**arguments), self._loop)

    def _start(self) -> asyncio.AbstractEventLoop:
        started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        # A daemon, because the interpreter waits for all other threads before it closes what is left open.
        thread = threading.Thread(
            target=asyncio.run, args=[_serve(self._client, started)], name="anabranch client", daemon=True
        )
        thread.start()
        loop, ended = started.result()
        self._stop = weakref.finalize(self, _stop, loop, ended, thread)
        return loop


async def _serve(client: Client, started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
    ended = asyncio.Event()
    async with client:
        started.set_result((asyncio.get_running_loop(), ended))
        await ended.wait()


def _stop(loop: asyncio.AbstractEventLoop, ended: asyncio.Event, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(ended.set)
    # The garbage collector runs in any thread.
    if thread is not threading.current_thread():
        thread.join()
