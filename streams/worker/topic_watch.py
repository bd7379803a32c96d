"""Watches the worker's topics: which are missing, and whether the input topic was recreated."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from aiokafka.errors import KafkaError

from streams.broker.topics import MissingTopics

__all__ = ["TopicWatch"]

logger = logging.getLogger(__name__)

# aiokafka's logger: it repeats that a topic is missing with every metadata request.
_CLIENT = "aiokafka.cluster"

# A broker that has not answered after this time may not answer at all. All others are asked, one after the other.
_OVERDUE_SECONDS = 3.0


class TopicWatch(logging.Filter):
    """Checks the topics every few seconds.

    Args:
        fetch_topic_ids: returns each existing topic's id, empty if the broker has none; raises KafkaError.
        topics: the topics that must exist.
        assigned_ids: returns the topics' ids when their partitions were assigned; None while none are assigned, or
            while the broker is asked for the ids.
        input_topic: the name of the input topic.
        rejoin: makes the group rebalance; called if the input topic was recreated since the assignment.
        on_failed: called if the topics cannot be checked, or not in time. An idle worker's clients may not notice for a
            minute that Kafka does not answer.
        interval_seconds: time between two checks.
        overdue_seconds: how long a check may take before `on_failed` is called.
        texts: whether the stage is an embedding stage.

    Attributes:
        missing: the topics that do not exist, in order; empty until the first check.
    """

    def __init__(
        self,
        fetch_topic_ids: Callable[[], Awaitable[Mapping[str, str]]],
        *,
        topics: Sequence[str],
        input_topic: str,
        assigned_ids: Callable[[], Mapping[str, str] | None],
        rejoin: Callable[[], Awaitable[None]],
        on_failed: Callable[[], None],
        interval_seconds: float,
        overdue_seconds: float = _OVERDUE_SECONDS,
        texts: bool = False,
    ) -> None:
        super().__init__()
        self._fetch_topic_ids = fetch_topic_ids
        self._topics = topics
        self._input_topic = input_topic
        self._assigned_ids = assigned_ids
        self._rejoin = rejoin
        self._on_failed = on_failed
        self._interval_seconds = interval_seconds
        self._overdue_seconds = overdue_seconds
        self._texts = texts
        self.missing: Sequence[str] = ()
        self._ids: dict[str, str] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Drop the client's messages about missing topics, which this class logs itself, once."""
        return not str(record.msg).endswith("not found in cluster metadata")

    async def watch(self) -> None:
        """Check the topics indefinitely."""
        logging.getLogger(_CLIENT).addFilter(self)
        try:
            while True:
                try:
                    await self._check_once()
                except (KafkaError, OSError, TimeoutError):
                    self._on_failed()
                await asyncio.sleep(self._interval_seconds)
        finally:
            logging.getLogger(_CLIENT).removeFilter(self)

    async def _check_once(self) -> None:
        overdue = asyncio.get_running_loop().call_later(self._overdue_seconds, self._on_failed)
        try:
            found = await self._fetch_topic_ids()
        finally:
            overdue.cancel()
        missing = sorted(set(self._topics) - set(found))
        if missing and missing != self.missing:
            logger.error("%s", MissingTopics(missing, texts=self._texts))
        elif self.missing and not missing:
            logger.info("all topics exist")
        self.missing = missing
        # Ignore an empty id: this broker is older than the others, or is not allowed to describe the topic.
        known = {topic: topic_id for topic, topic_id in found.items() if topic_id}
        for topic, topic_id in known.items():
            if self._ids.get(topic, topic_id) != topic_id:
                logger.error("%s was deleted and created again", topic)
        self._ids |= known
        assigned_ids = self._assigned_ids()
        topic = self._input_topic
        if assigned_ids is not None and topic in found:
            read = assigned_ids.get(topic)
            if read is None or known.get(topic, read) != read:
                await self._rejoin()
