"""The limits of a worker's end."""

import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from streams.settings import load
from streams.worker.app import WorkerApp
from streams.worker.shutdown import ShutdownDeadline

_STUCK = """
import time
from streams.worker import shutdown
shutdown._LAST_RESORT_SECONDS = 0.2
end = shutdown.ShutdownDeadline(0.1)
end.begin()
end.begin()
time.sleep(300)  # whatever hangs, the event loop included
"""


@pytest.fixture(autouse=True)
def _no_last_resort(monkeypatch: pytest.MonkeyPatch) -> None:
    """An end that begins in this process must not end the tests half a minute later."""
    monkeypatch.setattr(ShutdownDeadline, "_force_exit", lambda _: None)


def test_a_process_that_hangs_is_ended() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _STUCK], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "longer than the grace period" in done.stderr


def test_a_step_has_what_is_left_of_the_time_and_never_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shutdown = ShutdownDeadline(3600)
    assert shutdown.seconds_left() > 3600
    shutdown.begin()
    assert 3500 < shutdown.seconds_left() <= 3601
    monkeypatch.setattr("streams.worker.shutdown.monotonic", lambda: time.monotonic() + 7200)
    assert 0 < shutdown.seconds_left() < 1


async def test_a_drain_has_what_is_left_of_the_grace_period(monkeypatch: pytest.MonkeyPatch) -> None:
    root: Any = SimpleNamespace(
        settings=load({"ANABRANCH_GRACE_PERIOD_SECONDS": "25"}),
        shutdown=ShutdownDeadline(25),
        _delivery=AsyncMock(),
        _stopping=Mock(),
    )
    began = 1000.0
    monkeypatch.setattr(root.shutdown, "_began", began)
    for before, seconds in ((0, 25), (20, 6), (60, 0.3)):
        monkeypatch.setattr("streams.worker.shutdown.monotonic", lambda at=began + before: at)
        await WorkerApp.drain(root, stopping=True)
        assert root._delivery.drain.call_args.args[0] == pytest.approx(seconds)
