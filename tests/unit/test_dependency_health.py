"""What the worker knows of the store: its states, what it says of them, and when it may not start."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import pytest

from streams.core.errors import SearchTimeout, StoreMisconfigured, StoreUnavailable
from streams.worker.dependency_health import DependencyHealth, DependencyState, StartupRefused

UP, DOWN, MISCONFIGURED, UNKNOWN = (
    DependencyState.UP,
    DependencyState.DOWN,
    DependencyState.MISCONFIGURED,
    DependencyState.UNKNOWN,
)


@dataclass(frozen=True)
class Finding:
    level: str
    detail: str = "the index is missing"
    remedy: str = "run `anabranch migrate`"


class Server:
    """A store that answers what it is told to, and counts how often it was asked."""

    def __init__(self, *, inspect_every: int = 1_000_000, quiet_period_seconds: float = 30.0) -> None:
        self.error: BaseException | None = None
        self.findings: Sequence[Finding] = ()
        self.probes = 0
        self.inspections = 0
        self.health = DependencyHealth(
            probe=self.probe,
            inspect=self.inspect,
            interval_seconds=0.001,
            inspect_every=inspect_every,
            quiet_period_seconds=quiet_period_seconds,
        )

    async def probe(self) -> None:
        self.probes += 1
        if self.error is not None:
            raise self.error

    async def inspect(self) -> Sequence[Finding]:
        self.inspections += 1
        if self.error is not None:
            raise self.error
        return self.findings

    @property
    def asked(self) -> int:
        return self.probes + self.inspections

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        watch = asyncio.create_task(self.health.watch())
        try:
            yield
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch

    async def turns(self, number: int = 5) -> None:
        """Wait until it has been asked a few times more, and its answers have been heard."""
        until = self.asked + number
        async with asyncio.timeout(5):
            while self.asked < until:  # noqa: ASYNC110  # asked by the watch, at its own pace
                await asyncio.sleep(0.001)


async def test_before_the_first_probe_nothing_is_known() -> None:
    server = Server()
    assert (server.health.state, server.health.ready) == (UNKNOWN, False)


async def test_a_passed_preflight_is_readiness() -> None:
    server = Server()
    async with server.watched():
        async with asyncio.timeout(1):
            await server.health.wait_admitted()
        await server.turns()
        assert (server.health.state, server.health.ready) == (UP, True)
    # One preflight is enough; from then on a sign of life is.
    assert server.inspections == 1
    assert server.probes > 1


async def test_an_outage_is_readiness_lost_and_found_again() -> None:
    server = Server()
    async with server.watched():
        await server.turns()
        server.error = StoreUnavailable("PostgreSQL is unreachable")
        await server.turns()
        assert (server.health.state, server.health.ready) == (DOWN, False)
        assert server.health.reason == "PostgreSQL is unreachable"
        server.error = SearchTimeout("no answer in time")
        await server.turns()
        assert server.health.state is DOWN
        server.error = None
        await server.turns()
        assert (server.health.state, server.health.ready) == (UP, True)


async def test_events_wait_for_a_preflight_that_passes() -> None:
    server = Server()
    server.error = StoreUnavailable("starting up")
    waiting = asyncio.create_task(server.health.wait_admitted())
    async with server.watched():
        await server.turns()
        assert not waiting.done()
        assert server.probes == 0  # a sign of life is no admission
        server.error = None
        server.findings = [Finding("unready")]
        await server.turns()
        assert not waiting.done()
        assert server.health.state is MISCONFIGURED
        server.findings = ()
        async with asyncio.timeout(1):
            await waiting
        assert server.health.ready


async def test_an_outage_after_that_does_not_take_the_admission_back() -> None:
    # Events in work retry by themselves, and know better than the probe when the store is there again.
    server = Server()
    async with server.watched():
        await server.turns()
        server.error = StoreUnavailable("down")
        await server.turns()
        async with asyncio.timeout(1):
            await server.health.wait_admitted()
        assert not server.health.ready


async def test_a_missing_index_is_reported_with_its_remedy_and_checked_again() -> None:
    server = Server()
    server.findings = [Finding("ok", "fine", ""), Finding("unready")]
    async with server.watched():
        await server.turns()
        assert (server.health.state, server.health.ready) == (MISCONFIGURED, False)
        assert server.health.reason == "the index is missing: run `anabranch migrate`"
        assert server.probes == 0
        server.findings = [Finding("ok", "fine", "")]
        await server.turns()
        assert server.health.ready


async def test_an_unsafe_role_ends_the_watch() -> None:
    server = Server()
    server.findings = [Finding("unready"), Finding("refused", "the role is a superuser", "use another")]
    async with asyncio.timeout(1):
        with pytest.raises(StartupRefused, match="the role is a superuser") as caught:
            await server.health.watch()
    assert "use another" in str(caught.value)
    assert "index" not in str(caught.value)
    assert not server.health.ready


async def test_a_store_that_becomes_unsafe_holds_events_back_until_it_is_safe_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="streams")
    server = Server(inspect_every=5)
    async with server.watched():
        await server.turns(8)
        assert server.health.ready
        server.findings = [Finding("refused", "row-level security of documents is not enabled")]
        await server.turns(12)
        server.health.report_success()  # of a search that began before, or that found no rows
        await server.turns()
        assert (server.health.state, server.health.ready) == (MISCONFIGURED, False)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await server.health.wait_admitted()
        server.findings = ()
        async with asyncio.timeout(1):
            await server.health.wait_admitted()
        await server.turns()
        assert server.health.ready
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "store is up: preflight passed"),
        (
            "ERROR",
            "store is misconfigured: row-level security of documents is not enabled (run `anabranch migrate`)",
        ),
        ("INFO", "store is up: preflight passed"),
    ]


async def test_only_a_misconfiguration_is_taken_at_an_event_s_word() -> None:
    server = Server()
    async with server.watched():
        await server.turns()
        server.health.report(StoreUnavailable("one connection was reset"))
        server.health.report(SearchTimeout("one search was slow"))
        assert server.health.ready
        server.health.report(StoreMisconfigured("a table is missing"))
        assert (server.health.state, server.health.ready) == (MISCONFIGURED, False)


async def test_a_preflight_that_sees_nothing_does_not_contradict_an_event() -> None:
    server = Server()
    async with server.watched():
        await server.turns()
        server.health.report(StoreMisconfigured("permission denied"))
        await server.turns()
        assert (server.health.state, server.health.reason) == (MISCONFIGURED, "permission denied")
        # The event tries again: a search that works settles it.
        server.health.report_success()
        assert server.health.ready
        await server.turns()
        assert server.health.ready


async def test_an_event_that_is_never_heard_of_again_does_not_keep_the_worker_unready() -> None:
    server = Server(quiet_period_seconds=0.05)
    async with server.watched():
        await server.turns()
        server.health.report(StoreMisconfigured("permission denied"))
        await server.turns(3)
        assert not server.health.ready
        await asyncio.sleep(0.06)
        await server.turns(3)
        assert server.health.ready


async def test_an_outage_on_top_of_a_misconfiguration_does_not_fix_it() -> None:
    server = Server()
    async with server.watched():
        await server.turns()
        server.health.report(StoreMisconfigured("permission denied"))
        server.error = StoreUnavailable("down")
        await server.turns()
        assert server.health.state is DOWN
        server.error = None
        await server.turns()
        assert not server.health.ready
        server.health.report(StoreMisconfigured("permission denied"))
        server.health.report_success()
        assert server.health.ready


async def test_an_index_that_is_missing_behind_an_outage_is_still_missing_after_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="streams")
    server = Server(inspect_every=7)
    async with server.watched():
        await server.turns(2)
        server.findings = [Finding("unready")]
        await server.turns(10)
        assert server.health.state is MISCONFIGURED
        server.error = StoreUnavailable("down")
        await server.turns()
        assert server.health.state is DOWN
        caplog.clear()
        server.error = None
        await server.turns(10)
        assert server.health.state is MISCONFIGURED
    assert [record.getMessage() for record in caplog.records] == [
        "store is misconfigured: the index is missing: run `anabranch migrate`"
    ]


async def test_a_preflight_that_a_success_overtook_is_out_of_date() -> None:
    server = Server()
    server.findings = [Finding("unready")]
    looked = asyncio.Event()

    async def inspect_slowly() -> Sequence[Finding]:
        seen = server.findings
        looked.set()
        await asyncio.sleep(0.01)
        return seen

    health = DependencyHealth(probe=server.probe, inspect=inspect_slowly)
    health.report(StoreMisconfigured("a table is missing"))
    check = asyncio.create_task(health.check())
    await looked.wait()
    server.findings = ()  # mended, and an event finds out before the preflight that began earlier ends
    health.report_success()
    await check
    assert health.state is UP


async def test_a_success_says_nothing_about_an_outage() -> None:
    server = Server()
    async with server.watched():
        await server.turns()
        server.error = StoreUnavailable("down")
        await server.turns()
        server.health.report_success()  # one that was still under way
        assert server.health.state is DOWN


async def test_a_change_is_one_line_however_often_it_is_met(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="streams")
    server = Server()
    async with server.watched():
        await server.turns()
        server.error = StoreUnavailable("PostgreSQL is unreachable")
        await server.turns(10)
        server.error = None
        await server.turns(10)
        for _ in range(10):
            server.health.report(StoreMisconfigured("a table is missing; run `anabranch migrate`"))
            server.health.report(StoreUnavailable("reset"))
        await server.turns()
        for _ in range(10):
            server.health.report_success()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "store is up: preflight passed"),
        ("ERROR", "store is down: PostgreSQL is unreachable"),
        ("INFO", "store is up: preflight passed"),
        ("ERROR", "store is misconfigured: a table is missing; run `anabranch migrate`"),
        ("INFO", "store is up: an event succeeded"),
    ]


async def test_warnings_of_the_preflight_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="streams")
    server = Server(inspect_every=2)
    server.findings = [Finding("warning", "storage is EXTENDED", "SET STORAGE PLAIN"), Finding("ok")]
    async with server.watched():
        await server.turns(12)
        assert server.inspections > 2
        assert server.health.ready
    assert [record.getMessage() for record in caplog.records] == [
        "preflight: storage is EXTENDED (SET STORAGE PLAIN)"
    ]


async def test_a_ping_that_began_before_an_event_s_error_does_not_say_that_it_is_fixed() -> None:
    pinged, answer = asyncio.Event(), asyncio.Event()

    async def probe() -> None:
        pinged.set()
        await answer.wait()

    health = DependencyHealth(probe=probe, inspect=Server().inspect)
    await health.check()
    checking = asyncio.create_task(health.check(full=False))
    await pinged.wait()
    health.report(StoreMisconfigured("a table is missing"))
    answer.set()
    await checking
    assert (health.state, health.reason) == (MISCONFIGURED, "a table is missing")
