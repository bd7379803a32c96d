"""One replay of a dead-letter topic at a time, by membership in a consumer group.

The group has no offsets and no partitions to share out: it elects. Whoever holds the lock says so whenever the group
forms anew, and keeps it; the broker notices when a holder dies, and lets the next one in after a few seconds. A holder
that was stopped for longer than that is told when it comes back; at worst one batch was replayed twice, with the same
result ids.
"""

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from aiokafka import AIOKafkaConsumer
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata

__all__ = ["LockHeld", "Lock", "lock_group"]

_SESSION_MS = 10_000
# A holder that lives hears of a newcomer with its next heartbeat, well before the group stops waiting for it.
_REBALANCE_MS = 5_000
_HEARTBEAT_MS = 1_000
_NEVER_MS = 2**31 - 1

_HOLDS, _DOES_NOT = b"1", b"0"


class LockHeld(Exception):
    """Somebody else holds the lock."""


def lock_group(dead_letter_topic: str) -> str:
    """The consumer group that stands for the lock; the topic's name, since the topic is what is locked."""
    return f"{dead_letter_topic}.replay"


class _Election:
    """An assignor in aiokafka's sense, which assigns one bit."""

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
    """An async context manager that is entered while nobody else is in.

    Args:
        options: keyword arguments of a Kafka client.
        topic: the dead-letter topic, which must exist.
    """

    def __init__(self, options: Mapping[str, Any], topic: str) -> None:
        self._election = _Election()
        self._consumer = AIOKafkaConsumer(
            topic,
            **options,
            group_id=lock_group(topic),
            enable_auto_commit=False,
            session_timeout_ms=_SESSION_MS,
            rebalance_timeout_ms=_REBALANCE_MS,
            heartbeat_interval_ms=_HEARTBEAT_MS,
            max_poll_interval_ms=_NEVER_MS,  # it polls nothing
            partition_assignment_strategy=(self._election,),
        )

    async def __aenter__(self) -> Self:
        """Raises Busy where somebody else holds it, KafkaError where the group cannot be joined."""
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
        """Raises Busy where it is somebody else's by now."""
        if not self._election.holds:
            raise LockHeld
