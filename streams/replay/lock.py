"""A lock that allows one replay of a dead-letter topic at a time, based on a consumer group.

The group has no offsets and assigns no partitions: it elects the lock's holder. The holder announces itself at each
rebalance and keeps the lock. If it dies, the broker notices and admits the next one after a few seconds. A holder that
was suspended for longer than that finds out when it resumes; in the worst case one batch is replayed twice, with the
same result ids.
"""

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata

from streams.broker.clients import new_consumer

__all__ = ["Lock", "LockHeld", "lock_group"]

_SESSION_MS = 10_000
# A live holder learns of a newcomer with its next heartbeat, well before the group stops waiting for it.
_REBALANCE_MS = 5_000
_HEARTBEAT_MS = 1_000
_NEVER_MS = 2**31 - 1

_HOLDS, _DOES_NOT = b"1", b"0"


class LockHeld(Exception):
    """Another replay holds the lock."""


def lock_group(dead_letter_topic: str) -> str:
    """The name of the lock's consumer group; it contains the topic's name, because the lock is per topic."""
    return f"{dead_letter_topic}.replay"


class _Election:
    """A partition assignor for aiokafka that only assigns the lock."""

    name = "anabranch-replay"

    def __init__(self) -> None:
        self.holds = False

    def metadata(self, topics: Iterable[str]) -> ConsumerProtocolMemberMetadata:
        return ConsumerProtocolMemberMetadata(0, list(topics), _HOLDS if self.holds else _DOES_NOT)

    def assign(
        self, cluster: object, members: Mapping[str, ConsumerProtocolMemberMetadata]
    ) -> dict[str, ConsumerProtocolMemberAssignment]:
        del cluster
        elected = min(members, key=lambda member: (members[member].user_data != _HOLDS, member))
        return {
            member: ConsumerProtocolMemberAssignment(0, [], _HOLDS if member == elected else _DOES_NOT)
            for member in members
        }

    def on_assignment(self, assignment: ConsumerProtocolMemberAssignment) -> None:
        self.holds = assignment.user_data == _HOLDS


class Lock:
    """An async context manager that holds the lock.

    Args:
        options: keyword arguments of a Kafka client.
        topic: the dead-letter topic, which must exist.
    """

    def __init__(self, options: Mapping[str, Any], topic: str) -> None:
        self._election = _Election()
        self._consumer = new_consumer(
            options,
            topic,
            group_id=lock_group(topic),
            session_timeout_ms=_SESSION_MS,
            rebalance_timeout_ms=_REBALANCE_MS,
            heartbeat_interval_ms=_HEARTBEAT_MS,
            max_poll_interval_ms=_NEVER_MS,  # it never polls
            partition_assignment_strategy=(self._election,),
        )

    async def __aenter__(self) -> Self:
        """Raise LockHeld if another replay holds the lock, KafkaError if the group cannot be joined."""
        try:
            await self._consumer.start()
            self.verify()
        except BaseException:
            await self._consumer.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._consumer.stop()

    def verify(self) -> None:
        """Raise LockHeld if another replay now holds the lock."""
        if not self._election.holds:
            raise LockHeld
