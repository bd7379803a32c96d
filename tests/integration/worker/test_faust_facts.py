"""What we know of Faust, and rely on or work around. Where one of these fails, an upgrade has changed it: look again.

Delivery (`streams.worker.delivery`) and the composition root (`streams.worker.app`) are built on them. Which names of
Faust's we use is in `tests/unit/internals.md`.
"""

from contextlib import suppress
from typing import Any

import faust
import pytest
from faust.transport.consumer import Consumer
from faust.types.tuples import TP

PARTITION = TP("queries", 0)


class Unconnected(Consumer):
    """Faust's book-keeping without a client, and without the client's thread."""


Unconnected.__abstractmethods__ = frozenset()


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> faust.App:
    made = faust.App("facts", broker="kafka://127.0.0.1:1", autodiscover=False, web_enabled=False)
    made.flow_control.resume()
    monkeypatch.setattr(made.transport, "Consumer", Unconnected)
    return made


def committed_after(app: faust.App, committed: int | None, *acknowledged: int) -> int | None:
    """Which offset Faust would commit."""
    consumer: Any = app._new_consumer()
    consumer._committed_offset[PARTITION] = committed
    consumer._acked[PARTITION] = list(acknowledged)
    offset: int | None = consumer._new_offset(PARTITION)
    return offset


def test_it_commits_past_a_gap_so_we_never_acknowledge_out_of_order(app: faust.App) -> None:
    # 100 is still in work, and would be lost.
    assert committed_after(app, 100, 101, 102, 103, 104) == 105
    # Nothing committed yet, 0 to 4 still in work: they would be lost.
    assert committed_after(app, None, 5, 6) == 7
    # In order, which is how we acknowledge, it is right.
    assert committed_after(app, None, 0, 1, 2) == 3
    assert committed_after(app, 100, 100, 101) == 102
    assert committed_after(app, 100) is None
    # A gap that it does see.
    assert committed_after(app, 100, 100, 101, 105) == 102


async def messages(app: faust.App, *, noack: bool, raising: bool) -> list[bool]:
    """Whether each of two events was acknowledged when the loop over them ended with the second."""
    channel = app.channel()
    stream: Any = app.stream(channel)
    for value in ("first", "second"):
        await channel.send(value=value)
    seen = []
    with suppress(ZeroDivisionError):
        async for event in (stream.noack() if noack else stream).events():
            seen.append(event)
            if len(seen) == 2:
                if raising:
                    1 / 0  # noqa: B018  # a defect in an agent
                break
    acknowledged = [event.message.acked for event in seen]
    await stream.stop()
    return acknowledged


async def test_it_acknowledges_what_an_agent_has_not_finished_unless_configured_not_to(
    app: faust.App,
) -> None:
    assert (await messages(app, noack=False, raising=False))[0]
    assert (await messages(app, noack=False, raising=True))[0]
    assert await messages(app, noack=True, raising=False) == [False, False]
    assert await messages(app, noack=True, raising=True) == [False, False]
