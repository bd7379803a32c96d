"""Every class of Faust that Anabranch extends, and every internal name of Faust that it uses.

No other module uses one, and `tests/unit/test_internals.py` fails if a release of Faust or mode renames one.

The transport has fixes for the cases that Faust's consumer does not handle:

- The time that a fetch waits at the broker: Faust does not let it be configured.
- Partitions to pause: Faust chooses the wrong ones.
- Events of aborted transactions: Faust reads them.
- Offsets missing from the log: Faust waits for them.
- A failed commit: it stops Faust's worker. Here it is retried until it has succeeded, so nothing is lost.
- Offsets acknowledged before a rebalance: Faust forgets them.
- Batches that cannot be read stop Faust's worker; batches that decompress to a huge size exhaust its memory
  (`streams.broker.records`).
- A member that has not polled for long: it would never rejoin.
- A topic that was deleted and created again: its offsets start over.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from math import inf
from time import monotonic, perf_counter
from typing import Any, Protocol

import aiokafka
import faust
import uvloop
from aiokafka.errors import CommitFailedError, IllegalStateError, KafkaError
from aiokafka.structs import OffsetAndMetadata, TopicPartition
from faust.app.base import BootStrategy
from faust.transport.drivers import aiokafka as driver
from faust.types import TP
from faust.web.drivers import aiohttp as web_driver
from mode.types import ServiceT

from streams.broker.aiokafka_internals import (
    client_of,
    configure_consumer,
    coordinator_of,
    forbid_topic_creation,
    position_of,
)
from streams.broker.publisher import Publisher
from streams.broker.records import MAX_HEADERS, ReadBudget, patch_fetcher
from streams.broker.topic_ids import topic_ids
from streams.settings import Settings
from streams.worker.shutdown import ShutdownDeadline

__all__ = ["App", "Consumer", "Root", "Transport", "Web", "Worker"]

logger = logging.getLogger(__name__)

# Maximum duration of one round of the fetch loop while a partition is paused.
_PAUSED_POLL_SECONDS = 0.01
# aiokafka retries a commit indefinitely if the broker is unreachable or does not know the topic (any more).
_COMMIT_SECONDS = 5.0
# A commit always gets at least this long, however late it begins.
_SHORTEST_COMMIT_SECONDS = 0.3
# Share of the revocation's time limit for the commit before the drain; if it fails, the commit after the drain follows.
_FIRST_COMMIT_SHARE = 0.05
_BOUNDS_SECONDS = 5.0
_NO_LEADER = -1
# The metadata of a committed offset: the id of the topic to which the offset belongs.
_TOPIC_ID_PREFIX = "topic id "
# Probes and one or two scrapers use three. A new connection closes the oldest one, so that probes always succeed.
_MAX_CONNECTIONS = 32


def _log_unless_kafka_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log exceptions that nobody awaited, except those of attempts that were aborted because they took too long."""
    if not isinstance(context.get("exception"), KafkaError):
        loop.default_exception_handler(context)


class _ConsumerThread(driver.AIOKafkaConsumerThread):
    logger = logging.getLogger("mode")

    def __init__(
        self,
        *args: Any,
        fetch_max_wait_seconds: float,
        max_inflated_bytes: int,
        stop_seconds: Callable[[], float],
        **kwargs: Any,
    ) -> None:
        # Like the main thread's loop: less CPU for each fetch.
        super().__init__(*args, thread_loop=uvloop.new_event_loop(), **kwargs)
        self._fetch_max_wait_ms = int(fetch_max_wait_seconds * 1000)
        self._max_inflated_bytes = max_inflated_bytes
        self._budget = ReadBudget(max_inflated_bytes)
        self._stop_seconds = stop_seconds
        self.fetched_at = 0.0
        self.committed: Mapping[TP, int] = {}
        self.topic_ids: Mapping[str, str] = {}
        """The topics' ids at the time of assignment, if the broker reported them; read from other threads."""
        self.assigned_ids: Mapping[str, str] | None = None
        """The same; None from an assignment until the broker has reported them or failed to."""
        self._assignment_changed = True
        self._commits_fail = False

    def _create_worker_consumer(self, transport: Any) -> aiokafka.AIOKafkaConsumer:
        forbid_topic_creation()
        patch_fetcher(self._max_inflated_bytes, self._budget, max_headers=MAX_HEADERS)
        self.thread_loop.set_exception_handler(_log_unless_kafka_error)
        consumer = super()._create_worker_consumer(transport)
        configure_consumer(
            consumer,
            fetch_max_wait_ms=self._fetch_max_wait_ms,
            flowing=lambda: bool(self.consumer.flow_active),
        )
        return consumer

    async def on_thread_stop(self) -> None:
        try:
            async with asyncio.timeout(self._stop_seconds()):
                await super().on_thread_stop()
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  # otherwise the thread's end would go unnoticed
            # Pending operations are cancelled one by one, and aiokafka passes on some of these cancellations.
            logger.warning(
                "Kafka does not answer (%s); leaving the consumer group without notice", type(error).__name__
            )
            if self._consumer is not None:
                # The last step of stopping. If it was reached, its futures were cancelled too, and are so again.
                with suppress(asyncio.CancelledError):
                    await client_of(self._consumer).close()

    async def on_partitions_assigned(self, assigned: set[TP], generation_id: int = 0) -> None:
        self._assignment_changed = True
        self.assigned_ids = None
        await super().on_partitions_assigned(assigned, generation_id)

    async def _fetch_records(self, *args: Any, **kwargs: Any) -> Any:
        self._budget.renew()
        records = await super()._fetch_records(*args, **kwargs)
        self.fetched_at = perf_counter()
        return records

    def next_offset(self, tp: TP) -> int | None:
        """See `position_of`; from any thread."""
        return None if self._consumer is None else position_of(self._consumer, tp)

    async def log_bounds(self, tps: Collection[TP]) -> Mapping[TP, tuple[int, int]]:
        """Fetch the first and the next offset of each log that has a leader, and the committed offsets.

        Raises:
            KafkaError, TimeoutError: the broker does not answer.
        """

        async def ask() -> Mapping[TP, tuple[int, int]]:
            consumer = self._ensure_consumer()
            leader = client_of(consumer).cluster.leader_for_partition
            # aiokafka returns offsets for all partitions or none, and waits for leaders.
            with_leader = [
                tp for tp in tps if leader(TopicPartition(tp.topic, tp.partition)) not in {None, _NO_LEADER}
            ]
            async with asyncio.timeout(_BOUNDS_SECONDS):
                starts, ends = (
                    await consumer.beginning_offsets(with_leader),
                    await consumer.end_offsets(with_leader),
                )
                if (coordinator := coordinator_of(consumer)) is not None:
                    fetched = await coordinator.fetch_committed_offsets(
                        [TopicPartition(tp.topic, tp.partition) for tp in with_leader]
                    )
                    self.committed = {
                        TP(tp.topic, tp.partition): int(offset.offset)
                        for tp, offset in fetched.items()
                        if self._is_same_topic(tp, offset)
                    }
            return {tp: (starts[tp], ends[tp]) for tp in with_leader}

        # Not through the call queue: it has two slots, and fetching occupies one of them.
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(ask(), self.thread_loop))

    async def commit(self, offsets: Mapping[TP, int], seconds: float = _COMMIT_SECONDS) -> bool:
        """See `_commit`."""
        return bool(await self.call_thread(self._commit, offsets, seconds))

    async def _commit(self, offsets: Mapping[TP, int], seconds: float = _COMMIT_SECONDS) -> bool:
        """Commit within the time limit.

        Returns:
            Whether the commit succeeded. It fails if there was a rebalance (another member reads those events again) or
            the broker is unreachable.
        """
        assigned = self.assignment()
        due = {
            tp: offset
            for tp, offset in offsets.items()
            # The topic's id must be known: without it, the offset would also count for a topic created later.
            if tp in assigned and tp.topic in self.topic_ids
        }
        if not due:
            return False
        self.tp_last_committed_at.update(dict.fromkeys(due, monotonic()))
        try:
            async with asyncio.timeout(seconds):
                await self._ensure_consumer().commit(
                    {
                        TopicPartition(tp.topic, tp.partition): OffsetAndMetadata(
                            offset, self._commit_metadata(tp)
                        )
                        for tp, offset in due.items()
                    }
                )
        except (CommitFailedError, IllegalStateError) as error:
            self._log_commit(f"offsets were not committed: the group has rebalanced ({type(error).__name__})")
            return False
        except (KafkaError, TimeoutError) as error:
            self._log_commit(f"offsets were not committed ({type(error).__name__}); retrying")
            return False
        self._log_commit(None)
        return True

    def _log_commit(self, problem: str | None) -> None:
        """Log that commits fail, and that they succeed again: while a broker does not answer, many fail."""
        if (problem is not None) == self._commits_fail:
            return
        self._commits_fail = problem is not None
        if problem is None:
            logger.info("offsets are committed again")
        else:
            logger.warning("%s", problem)

    def _commit_metadata(self, tp: TP) -> str:
        topic_id = self.topic_ids.get(tp.topic)
        return _TOPIC_ID_PREFIX + topic_id if topic_id else ""

    async def seek_to_committed(self) -> Mapping[TP, Any]:
        """Seek the assigned partitions to the committed offsets; return those, None where nothing is committed.

        An offset of a deleted topic with the same name is ignored.
        """
        committed: Mapping[TP, Any] = await self.call_thread(self._seek_to_committed)
        return committed

    async def _seek_to_committed(self) -> Mapping[TP, Any]:
        consumer = self._ensure_consumer()
        partitions = consumer.assignment()
        # Faust also seeks during the drain. The commit after the drain has offsets of the topic that was read before.
        if self._assignment_changed:
            self._assignment_changed = False
            try:
                self.topic_ids = await topic_ids(client_of(consumer), {tp.topic for tp in partitions})
            except (KafkaError, OSError, TimeoutError):
                self.topic_ids = {}  # the topic watch makes the member rejoin
            self.assigned_ids = self.topic_ids
        fetched = await coordinator_of(consumer).fetch_committed_offsets(partitions)
        found = {tp: self._valid_offset(tp, fetched.get(tp)) for tp in partitions}
        for tp, offset in found.items():
            # Also if nothing is committed: Faust may have read and dropped events during the rebalance. For an offset
            # removed by retention, the broker continues with the first existing one.
            consumer.seek(tp, offset or 0)
        return found

    def _valid_offset(self, tp: TopicPartition, fetched: OffsetAndMetadata | None) -> int | None:
        """The committed offset, if it belongs to the current topic with this name."""
        if fetched is None:
            return None
        if not self._is_same_topic(tp, fetched):
            logger.warning(
                "reading from the beginning: the committed offset belongs to a deleted topic with this name",
                extra={"topic": tp.topic, "partition": tp.partition},
            )
            return None
        return int(fetched.offset)

    def _is_same_topic(self, tp: TopicPartition, fetched: OffsetAndMetadata) -> bool:
        metadata = self._commit_metadata(tp)
        return not (
            metadata and fetched.metadata.startswith(_TOPIC_ID_PREFIX) and fetched.metadata != metadata
        )

    async def rejoin(self) -> None:
        """Make the group rebalance, so that every member seeks to the committed offsets."""
        await self.call_thread(self._rejoin)

    async def _rejoin(self) -> None:
        coordinator = coordinator_of(self._ensure_consumer())
        if coordinator is not None:
            coordinator.request_rejoin()


class Consumer(driver.Consumer):
    logger = logging.getLogger("mode")

    transport: "Transport"
    _thread: _ConsumerThread

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._acknowledged: dict[TP, int] = {}
        # The last event of each partition that was fetched since the assignment.
        self._fetched: dict[TP, int] = {}
        self._committing = asyncio.Lock()
        self._revocation_ends = inf
        self._without_id: Collection[str] = ()

    def _new_consumer_thread(self) -> _ConsumerThread:
        return _ConsumerThread(
            self,
            loop=self.loop,
            beacon=self.beacon,
            fetch_max_wait_seconds=self.transport.fetch_max_wait_seconds,
            max_inflated_bytes=self.transport.max_inflated_bytes,
            stop_seconds=self.transport.stop_seconds,
        )

    def seconds_left(self) -> float:
        """Time limit of the next step of a shutdown or revocation."""
        revocation = max(_SHORTEST_COMMIT_SECONDS, self._revocation_ends - monotonic())
        return min(self.transport.stop_seconds(), revocation)

    async def commit_in_time(self) -> None:
        """Commit for the last time, within the time limit."""
        if not await self._commit_within(self.seconds_left()):
            logger.warning(
                "Kafka does not answer; the last commit failed, so some events will be processed again"
            )

    async def _commit_within(self, seconds: float) -> bool:
        """Commit; False if it takes longer."""
        try:
            async with asyncio.timeout(seconds):
                await self.commit()
        except TimeoutError:
            return False
        return True

    async def commit_and_end_transactions(self) -> None:
        # Faust calls this when it stops.
        await self.commit_in_time()

    def _to_message(self, tp: TP, record: Any) -> Any:
        message: Any = super()._to_message(tp, record)
        message.fetched_at = self._thread.fetched_at
        self._fetched[tp] = record.offset
        return message

    def on_buffer_full(self, tp: TP) -> None:
        """No-op: the full queue already blocks the fetch loop.

        Faust would also pause the partition, although the queue is shared, and resume it a second later.
        """

    def on_buffer_drop(self, tp: TP) -> None:
        """No-op, see `on_buffer_full`."""

    def pause_fetching(self, tp: TP) -> None:
        """Stop fetching a partition; events that were already fetched together with others still arrive."""
        super().on_buffer_full(tp)

    def resume_fetching(self, tp: TP) -> None:
        """Fetch from a paused partition again."""
        super().on_buffer_drop(tp)

    async def _wait_next_records(self, timeout: float) -> Any:  # noqa: ASYNC109  # Faust's signature
        active = self._get_active_partitions()
        if self._buffered_partitions and self.flow_active:
            # A partition that is resumed meanwhile is not fetched before the next round. Faust would wait a second for
            # events of the others, and sleep for a second if there are none.
            if not active:
                await self.sleep(_PAUSED_POLL_SECONDS)
                return {}, active
            timeout = _PAUSED_POLL_SECONDS
        return await super()._wait_next_records(timeout)

    async def on_partitions_assigned(self, assigned: set[TP], generation_id: int = 0) -> None:
        # From an earlier generation.
        self._buffered_partitions.clear()
        self._acknowledged.clear()
        self._fetched.clear()
        await super().on_partitions_assigned(assigned, generation_id)

    async def seek_to_committed(self) -> Mapping[TP, Any]:
        found: Mapping[TP, Any] = await super().seek_to_committed()
        for tp, offset in found.items():
            if offset is None:
                # The committed offset belongs to a deleted topic; Faust replaces its copy only by committed offsets.
                self._committed_offset.pop(tp, None)
        return found

    def acknowledge(self, tp: TP, offset: int) -> None:
        """Acknowledge this event and all before it in its partition, for the next commit.

        Events are acknowledged strictly in order (`streams.core.acknowledgement`), so the last one covers all before
        it, also if there are gaps: compaction and transaction markers use up offsets. Faust waits for these offsets,
        and after a gap that follows offset 0 it never commits again.
        """
        self._acknowledged[tp] = offset + 1

    async def commit(self, topics: Any = None, start_new_transaction: bool = True) -> bool:  # noqa: ARG002, FBT001, FBT002  # Faust's own
        """Commit everything that was acknowledged before the call.

        Faust's own method returns at once while another commit runs, and treats a rejected commit as successful.

        Returns:
            Whether the commit succeeded. The next call tries again.
        """
        async with self._committing:
            due = dict(self._acknowledged)
            if not due:
                return True
            # Not a failed commit: none is attempted before the topic's id is known.
            without_id = sorted({tp.topic for tp in due if tp.topic not in self._thread.topic_ids})
            if without_id and without_id != self._without_id:
                logger.warning(
                    "offsets of %s are not committed: the topic's id is not known; retrying",
                    ", ".join(without_id),
                )
            self._without_id = without_id
            due = {tp: offset for tp, offset in due.items() if tp.topic not in without_id}
            if not due:
                return False
            # A commit that continues after a revocation would belong to the next generation.
            if not await self._thread.commit(due, min(_COMMIT_SECONDS, self.seconds_left())):
                self.transport.on_commit_failed()
                return False
            self._committed_offset.update(due)
            # Never commit the same offset twice: in a rebalance Faust forgets what is committed, and commits again
            # after the drain. By then the topic may have been recreated, on a broker that drops an offset's metadata.
            for tp, offset in due.items():
                if self._acknowledged.get(tp) == offset:
                    del self._acknowledged[tp]
            return not without_id

    def committed(self, tp: TP) -> int | None:
        """The first offset that is not committed, 0 if nothing is; None while it is being fetched."""
        # Just after a rebalance it is not known yet; treating it as 0 would report the whole log as lag.
        if tp not in self._read_offset:
            return None
        # Faust forgets it in a rebalance, and may not fetch it again; the broker knows it.
        return max(self._committed_offset.get(tp) or 0, self._thread.committed.get(tp, 0))

    def next_offset(self, tp: TP) -> int | None:
        """The next offset to fetch, past offsets without an event too.

        None if an event before it is not committed, wherever it is now, or if it is not known.
        """
        committed = self.committed(tp)
        if committed is None or committed <= self._fetched.get(tp, -1):
            return None
        return self._thread.next_offset(tp)

    async def log_bounds(self, tps: Collection[TP]) -> Mapping[TP, tuple[int, int]]:
        """Fetch the first and the next offset of each log that has a leader.

        Raises:
            KafkaError, TimeoutError: the broker does not answer.
        """
        return await self._thread.log_bounds(tps)

    async def _add_gap(self, tp: TP, offset_from: int, offset_to: int) -> None:
        """No-op: Faust would enumerate every offset in the gap."""

    @property
    def topic_ids(self) -> Mapping[str, str] | None:
        """The topics' ids at the time of assignment, if the broker reported them; an id is empty if it has none.

        None just after an assignment, while the broker is asked.
        """
        return self._thread.assigned_ids

    async def rejoin(self) -> None:
        """Make the group rebalance, so that every member seeks to the committed offsets."""
        await self._thread.rejoin()

    def verify_event_path(self, now: float, tp: TP) -> None:
        """No-op: Faust would log partitions that seem slow, and stop the worker if one has no position.

        A partition has no position while its topic is missing or its log has been truncated.
        """

    async def on_partitions_revoked(self, revoked: set[TP]) -> None:
        self._revocation_ends = monotonic() + self.transport.revocation_seconds
        try:
            # Faust forgets the committed offsets before it waits for the events in flight.
            await self._commit_within(
                max(_SHORTEST_COMMIT_SECONDS, _FIRST_COMMIT_SHARE * self.transport.revocation_seconds)
            )
            await super().on_partitions_revoked(revoked)
        finally:
            self._revocation_ends = inf
        self._acknowledged.clear()


class Transport(driver.Transport):
    """Faust's transport with the consumer above.

    Args:
        fetch_max_wait_seconds: how long the broker may delay an empty fetch response.
        max_inflated_bytes: maximum decompressed size of one batch.
        stop_seconds: returns the time limit of a shutdown step; called when the step begins.
        revocation_seconds: time limit of the drain and the commits of a rebalance together.
        on_commit_failed: called for every failed commit.
    """

    Consumer = Consumer

    def __init__(
        self,
        *args: Any,
        fetch_max_wait_seconds: float,
        max_inflated_bytes: int,
        stop_seconds: Callable[[], float],
        revocation_seconds: float,
        on_commit_failed: Callable[[], None],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.fetch_max_wait_seconds = fetch_max_wait_seconds
        self.max_inflated_bytes = max_inflated_bytes
        self.stop_seconds = stop_seconds
        self.revocation_seconds = revocation_seconds
        self.on_commit_failed = on_commit_failed


class Web(web_driver.Web):
    """Faust's web server, with a limit on its connections: a new one closes the oldest when there are too many.

    The server has no authentication, and aiohttp keeps a connection open as long as its client does not complete the
    request. Enough of them would use up all file descriptors, and connecting to Kafka or PostgreSQL would fail.
    """

    logger = logging.getLogger("mode")

    async def start_server(self) -> None:
        """Start the web server."""
        await self._runner.setup()
        server: Any = self._runner.server  # created by `setup`
        server.connection_made = _bounded(server.connection_made)
        await self._create_site().start()


def _bounded(
    connection_made: Callable[[Any, asyncio.Transport], None],
) -> Callable[[Any, asyncio.Transport], None]:
    connections: deque[asyncio.Transport] = deque()

    def bounded(handler: Any, transport: asyncio.Transport) -> None:
        connection_made(handler, transport)
        for _ in range(len(connections)):
            if not (connection := connections.popleft()).is_closing():
                connections.append(connection)
        connections.append(transport)
        if len(connections) > _MAX_CONNECTIONS:
            connections.popleft().abort()

    return bounded


class Root(Protocol):
    """The interface of the composition root for Faust's app, its transport and its worker."""

    @property
    def settings(self) -> Settings: ...
    @property
    def shutdown(self) -> ShutdownDeadline: ...
    @property
    def publisher(self) -> Publisher: ...
    @property
    def dead_letters(self) -> Publisher: ...
    @property
    def reply_publisher(self) -> Publisher: ...

    @property
    def revocation_seconds(self) -> float:
        """Time limit of the drain and the commits of a rebalance together."""
        ...

    def commit_failed(self) -> None:
        """Called when a commit has failed."""
        ...

    def reopen(self, assigned: Collection[TP]) -> None:
        """Called when partitions have been assigned."""
        ...

    async def open(self) -> None:
        """Called before any service starts."""
        ...

    async def drain(self, *, stopping: bool) -> None:
        """Wait for the events in flight."""
        ...

    async def close(self) -> None:
        """Called after the last event."""
        ...


class _Boot(BootStrategy):
    """Start order. The web server starts first, so that liveness probes work while the worker waits for Kafka.

    Faust's own producer is not started: it reports failed sends as successful, and waits for up to twenty minutes.
    """

    enable_kafka_producer = False

    app: "App"

    def server(self) -> Iterable[ServiceT]:
        root = self.app.root
        return self._chain(
            self.sensors(),
            self.web_server(),
            [root.publisher, root.dead_letters, root.reply_publisher],
            self.kafka_consumer(),
            self.agents(),
            self.kafka_conductor(),
            self.tables(),
        )


class App(faust.App):
    """Faust's app; forwards the hooks for subclasses to the composition root.

    Do not add anything else here: Faust stores its own state on this object under ordinary names.
    """

    BootStrategy = _Boot
    logger = logging.getLogger("mode")  # logs each step of a service's life cycle, like Faust's own apps
    root: Root

    def _new_transport(self) -> Transport:
        return Transport(
            self.conf.broker_consumer,
            self,
            fetch_max_wait_seconds=self.root.settings.anabranch_fetch_max_wait_seconds,
            max_inflated_bytes=self.root.settings.anabranch_max_inflated_bytes,
            stop_seconds=self.root.shutdown.seconds_left,
            revocation_seconds=self.root.revocation_seconds,
            on_commit_failed=self.root.commit_failed,
        )

    def _new_web(self) -> Web:
        return Web(self)

    def _create_directories(self) -> None:
        """None: nothing is stored there, and existing files may belong to something else."""

    async def on_start(self) -> None:
        await super().on_start()
        await self.root.open()

    async def on_stop(self) -> None:
        await super().on_stop()
        await self.root.close()

    async def _on_partitions_assigned(self, assigned: set[TP], generation_id: int = 0) -> None:
        self.root.reopen(assigned)
        await super()._on_partitions_assigned(assigned, generation_id)

    async def _consumer_wait_empty(self, consumer: Any, logger: Any) -> None:  # noqa: ARG002  # Faust's own
        """Called when partitions are revoked, and on stop, after fetching has ended and before the commit."""
        await self.root.drain(stopping=self.should_stop)
        await consumer.commit_in_time()


class Worker(faust.Worker):
    """Faust's worker with its signal handling, but without its logging setup and spinner."""

    app: Any  # Faust's type does not have `root`

    def __init__(self, app: App, *, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(app, loop=loop, redirect_stdouts=False, quiet=True)
        self.spinner = None

    def _setup_logging(self) -> None:
        """Keep the configured logging."""

    def _setproctitle(self, info: str, *, ident: str = "anabranch") -> None:
        """Keep the process title, by which people find the process."""

    def on_worker_shutdown(self) -> None:
        """Print nothing."""

    async def _sentinel_task(self) -> None:
        """No-op: Faust would sleep for a second."""

    async def stop(self) -> None:
        """Stop after a signal or a crash."""
        self.app.root.shutdown.begin()
        await super().stop()
