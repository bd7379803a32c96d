"""Faust's Kafka transport, where its consumer does not do what a worker needs.

How long a fetch waits at the broker, which Faust fixes; events of transactions that were aborted, which Faust reads;
offsets that are missing from the log, which Faust waits for; a commit that fails, which ends Faust's worker; what was
acknowledged before a rebalance, which Faust forgets; and a member that has not asked for events for long, which would
never come back. Nothing is lost by a commit that fails: what it would have said is said by the next one.
"""

import logging
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

import aiokafka
from aiokafka.consumer.subscription_state import SubscriptionState
from aiokafka.errors import CommitFailedError, IllegalStateError, KafkaError
from aiokafka.structs import OffsetAndMetadata, TopicPartition
from faust.transport.drivers import aiokafka as driver
from faust.types import TP

from streams.broker.records import patch_fetcher

__all__ = ["Transport"]

logger = logging.getLogger(__name__)


class _Subscription(SubscriptionState):  # type: ignore[misc]  # aiokafka has no types
    """Lets a member join again that has left its group because it did not ask for events for long.

    aiokafka waits for it to ask before it joins; Faust does not let it ask before it has joined. Where the outage that
    held its events back was longer than the poll interval, it would stay away for ever.
    """

    def __init__(self, flowing: Callable[[], bool]) -> None:
        super().__init__()
        self._flowing = flowing

    @property
    def fetcher_idle_time(self) -> float:
        """Seconds since it last asked for events; 0 while it may not."""
        return super().fetcher_idle_time if self._flowing() else 0.0


class _ConsumerThread(driver.AIOKafkaConsumerThread):
    logger = logging.getLogger("mode")

    def __init__(self, *args: Any, fetch_max_wait_seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fetch_max_wait_ms = int(fetch_max_wait_seconds * 1000)
        self._uncommitted: dict[TP, int] = {}

    def _create_worker_consumer(self, transport: Any) -> aiokafka.AIOKafkaConsumer:
        patch_fetcher()
        consumer = super()._create_worker_consumer(transport)
        consumer._fetch_max_wait_ms = self._fetch_max_wait_ms  # noqa: SLF001  # read when the consumer starts
        # What its producer has taken back was never asked.
        consumer._isolation_level = "read_committed"  # noqa: SLF001  # likewise
        consumer._subscription = _Subscription(lambda: bool(self.consumer.flow_active))  # noqa: SLF001  # likewise
        return consumer

    async def _commit(self, offsets: Mapping[TP, int]) -> bool:
        """Commit, together with what an earlier commit failed to say.

        Returns:
            Whether the broker has it. It has not where the group has moved on (somebody else reads those events again)
            or the broker cannot be reached.
        """
        assigned = self.assignment()
        due = {tp: offset for tp, offset in {**self._uncommitted, **offsets}.items() if tp in assigned}
        self._uncommitted = {}
        if not due:
            return False
        self.tp_last_committed_at.update(dict.fromkeys(due, monotonic()))
        try:
            await self._ensure_consumer().commit(
                {
                    TopicPartition(tp.topic, tp.partition): OffsetAndMetadata(offset, "")
                    for tp, offset in due.items()
                }
            )
        except (CommitFailedError, IllegalStateError) as error:
            logger.warning("offsets were not committed: the group has moved on (%s)", type(error).__name__)
            return False
        except KafkaError as error:
            logger.warning("offsets were not committed (%s); the next commit will", type(error).__name__)
            self._uncommitted = due
            return False
        return True


class _Consumer(driver.Consumer):
    logger = logging.getLogger("mode")

    transport: "Transport"

    def _new_consumer_thread(self) -> _ConsumerThread:
        return _ConsumerThread(
            self,
            loop=self.loop,
            beacon=self.beacon,
            fetch_max_wait_seconds=self.transport.fetch_max_wait_seconds,
        )

    def _new_offset(self, tp: TP) -> int | None:
        """The offset to commit, or None where nothing is new.

        Events are acknowledged strictly in order (`streams.core.acknowledgement`), so the last one speaks for all
        before it, whatever is missing between them: offsets go to compaction and to the marks of transactions. Faust
        looks for them, and behind a gap that follows offset 0 it never commits again.
        """
        acked = self._acked[tp]
        if not acked:
            return None
        offset = max(acked) + 1
        acked.clear()
        self._acked_index[tp].clear()
        return int(offset)

    async def _add_gap(self, tp: TP, offset_from: int, offset_to: int) -> None:
        """Nothing: Faust would count a gap out, number by number, however large it is."""

    async def on_partitions_revoked(self, revoked: set[TP]) -> None:
        # Faust forgets what was acknowledged since the last commit before anybody is asked to commit it.
        await self.commit()
        await super().on_partitions_revoked(revoked)


class Transport(driver.Transport):
    """Faust's transport with the consumer above.

    Args:
        fetch_max_wait_seconds: how long the broker may hold a fetch that has nothing to bring.
    """

    Consumer = _Consumer

    def __init__(self, *args: Any, fetch_max_wait_seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fetch_max_wait_seconds = fetch_max_wait_seconds
