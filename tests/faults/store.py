"""Faults of PostgreSQL: ended, frozen, full, deadlocked, too slow, gone elsewhere."""

import asyncio
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import asyncpg
import psutil

from streams.embedded.postgres import EmbeddedPostgres
from tests.accounting import Asked
from tests.faults.fault import Fault
from tests.faults.load import Event, good_events
from tests.faults.stack import CONCURRENCY, Stack
from tests.integration.corpora import SLOW_ASKERS
from tests.integration.kafka.apache_kafka import free_ports

__all__ = ["FAULTS"]

_POLL_SECONDS = 6.0
_SEARCH_SECONDS = 1.0


async def stop(stack: Stack) -> None:
    """As a crash, and started again a moment later."""
    await _away(stack, stack.rng.uniform(0.5, 4))


async def stop_for_long(stack: Stack) -> None:
    """Longer than a member may stay away from its group without asking for events."""
    await _away(stack, 4 * _POLL_SECONDS)


async def _away(stack: Stack, seconds: float) -> None:
    async with stack.store_process:
        embedded = stack.store.embedded
        await asyncio.to_thread(embedded.stop, "immediate")
        await asyncio.sleep(seconds)
        await asyncio.to_thread(embedded.start)


async def freeze(stack: Stack) -> None:
    """Every one of its processes stands still for 25 s; connections stay open, and nothing comes."""
    async with stack.store_process:
        postmaster = psutil.Process(stack.store.embedded.pid)
        postmaster.send_signal(signal.SIGSTOP)
        frozen = [postmaster, *postmaster.children(recursive=True)]
        try:
            for process in frozen:
                process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(25)
        finally:
            for process in frozen:
                if process.is_running():
                    process.send_signal(signal.SIGCONT)


async def run_out_of_connections(stack: Stack) -> None:
    """Others hold every connection that there is."""
    async with stack.store_process:
        admin = await asyncpg.connect(stack.database.admin)
        taken: list[asyncpg.Connection] = []
        try:
            calm_since = time.monotonic()
            while time.monotonic() - calm_since < 1.0:  # whoever was about to log in is there by then
                ended = await admin.fetchval(
                    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'anabranch'"
                )
                with suppress(asyncpg.TooManyConnectionsError):
                    while True:
                        taken.append(await asyncpg.connect(stack.database.writer))
                        ended += 1
                if ended:
                    calm_since = time.monotonic()
                await asyncio.sleep(0.05)
            await stack.until_unready(seconds=20)
            await asyncio.sleep(5)
        finally:
            for connection in taken:
                await connection.close()
            await admin.close()


async def deadlock(stack: Stack) -> None:
    """A migration takes its locks in another order than a search; the server breaks the deadlock at our cost."""
    log = stack.store.embedded.log_file
    before = log.read_text(errors="replace").count("deadlock detected")
    admin = await asyncpg.connect(stack.database.admin)
    try:
        for _ in range(20):
            async with admin.transaction():
                await admin.execute("SET LOCAL deadlock_timeout = '10s'")  # so that it is not the victim
                await admin.execute("LOCK TABLE documents IN ACCESS EXCLUSIVE MODE")
                await asyncio.sleep(0.1)  # a search has locked the chunks, and waits
                await admin.execute("LOCK TABLE document_chunks IN ACCESS EXCLUSIVE MODE")
            if log.read_text(errors="replace").count("deadlock detected") > before:
                return
        raise AssertionError("no search met a deadlock")
    finally:
        await admin.close()


async def time_out(stack: Stack) -> None:
    """A lock is held for longer than a search may take; and whatever waits for it is cancelled by the server."""
    admin = await asyncpg.connect(stack.database.admin)
    canceller = await asyncpg.connect(stack.database.admin)
    cancelled = 0
    try:
        for seconds in (3 * _SEARCH_SECONDS, 0.5 * _SEARCH_SECONDS):
            async with admin.transaction():
                await admin.execute("LOCK TABLE documents IN ACCESS EXCLUSIVE MODE")
                await asyncio.sleep(seconds)
                cancelled += await canceller.fetchval(
                    "SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity"
                    " WHERE application_name = 'anabranch' AND wait_event_type = 'Lock'"
                )
                await asyncio.sleep(0.2)
    finally:
        await admin.close()
        await canceller.close()
    assert cancelled, "no search was cancelled"


async def make_some_slow(stack: Stack) -> None:
    await stack.execute(SLOW_ASKERS)


async def one_slow_event(stack: Stack) -> None:
    """Its search takes longer than a search may, every time; those before and behind it are good."""
    before = len(stack.output_reader.dead_letters)
    stack.load.send(next(_SLOW_EVENTS))
    await stack.output_reader.until(dead_letters=before + 1, seconds=60)


def slow_events() -> Iterator[Event]:
    events = good_events(principals=["user:slow"])
    for number in count():
        event = next(events)
        yield Event(Asked(event.asked.name, b"slow-%d" % number, "search_timeout"), event.value)


_SLOW_EVENTS = slow_events()


async def follow(stack: Stack) -> None:
    """A second server replicates the first, at another address; the workers are told of both."""
    embedded = stack.store.embedded
    folder = Path(tempfile.mkdtemp(prefix="anabranch-standby-"))
    stack.at_the_end.callback(shutil.rmtree, folder, ignore_errors=True)
    standby = EmbeddedPostgres(
        folder, settings={"fsync": "off", "hot_standby": "on", "max_connections": "80"}, port=free_ports(1)[0]
    )
    await asyncio.to_thread(_copy, embedded, standby)
    await asyncio.to_thread(standby.start)
    stack.at_the_end.callback(standby.stop, "immediate")
    stack.standby = standby
    first, second = f"127.0.0.1:{embedded.port}", f"127.0.0.1:{standby.port}"
    stack.dsn = stack.database.worker.replace(first, f"{first},{second}")


def _copy(primary: EmbeddedPostgres, standby: EmbeddedPostgres) -> None:
    standby._prepare_folder()
    done = primary._run(
        [
            primary.program("pg_basebackup"),
            "--write-recovery-conf",
            "--checkpoint=fast",
            f"--pgdata={standby.directory / 'data'}",
            f"--dbname={primary.dsn()}",
        ]
    )
    assert done.returncode == 0, done.stderr


async def fail_over(stack: Stack) -> None:
    """The first is gone for good; the second is promoted."""
    assert stack.standby is not None
    await asyncio.to_thread(stack.store.embedded.stop, "immediate")
    await asyncio.sleep(2)
    admin = await asyncpg.connect(
        stack.database.admin.replace(f":{stack.store.embedded.port}/", f":{stack.standby.port}/")
    )
    try:
        assert await admin.fetchval("SELECT pg_promote()")
        assert not await admin.fetchval("SELECT pg_is_in_recovery()")
    finally:
        await admin.close()


FAULTS = [
    Fault("store-immediate-stop", stop, rounds=5, repeats=4 * CONCURRENCY, combinable=True),
    Fault("store-frozen-25-s", freeze, repeats=4 * CONCURRENCY, combinable=True),
    Fault("store-out-of-connections", run_out_of_connections, rounds=2, repeats=4 * CONCURRENCY),
    Fault("store-deadlock", deadlock, rounds=5, repeats=4 * CONCURRENCY, combinable=True),
    Fault(
        "store-statement-timeout",
        time_out,
        rounds=5,
        settings={"ANABRANCH_SEARCH_TIMEOUT_SECONDS": str(_SEARCH_SECONDS)},
        repeats=4 * CONCURRENCY,
    ),
    Fault(
        "store-one-slow-event",
        one_slow_event,
        prepare=make_some_slow,
        rounds=3,
        settings={"ANABRANCH_SEARCH_TIMEOUT_SECONDS": str(_SEARCH_SECONDS)},
        repeats=4 * CONCURRENCY,
    ),
    Fault("store-failover", fail_over, prepare=follow, repeats=4 * CONCURRENCY),
    Fault(
        "store-away-longer-than-poll",
        stop_for_long,
        settings={"ANABRANCH_MAX_POLL_INTERVAL_SECONDS": str(_POLL_SECONDS)},
        rounds=2,
        limit_seconds=60,
        repeats=8 * CONCURRENCY,
    ),
]
