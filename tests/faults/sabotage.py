"""A worker whose Kafka client fails when a switch says so: ``python -m tests.faults.sabotage`` for the real one.

``FAULT_SWITCH`` names a file. While it holds ``commit``, every commit is rejected. When it changes to ``sender`` and a
number, the producer's sender ends once with an exception that nobody expects.
"""

import os
import sys
from pathlib import Path
from typing import Any

from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.errors import GroupAuthorizationFailedError
from aiokafka.producer.message_accumulator import MessageAccumulator

from streams.cli import main

__all__ = ["fail_senders", "reject_commits", "restore"]

_switch = Path(os.environ.get("FAULT_SWITCH", os.devnull))


def reject_commits(switch: Path) -> None:
    switch.write_text("commit")


def fail_senders(switch: Path, number: int) -> None:
    switch.write_text(f"sender {number}")


def restore(switch: Path) -> None:
    switch.write_text("")


def _state() -> str:
    return _switch.read_text() if _switch.exists() else ""


def _sabotage() -> None:
    commit = GroupCoordinator._do_commit_offsets
    drain = MessageAccumulator.drain_by_nodes
    struck = set()

    async def do_commit_offsets(self: GroupCoordinator, assignment: Any, offsets: Any) -> None:
        if _state() == "commit":
            raise GroupAuthorizationFailedError(self.group_id)
        await commit(self, assignment, offsets)

    def drain_by_nodes(self: MessageAccumulator, *args: Any, **kwargs: Any) -> Any:
        state = _state()
        if state.startswith("sender") and state not in struck:
            struck.add(state)
            raise RuntimeError("unexpected")
        return drain(self, *args, **kwargs)

    GroupCoordinator._do_commit_offsets = do_commit_offsets
    MessageAccumulator.drain_by_nodes = drain_by_nodes


if __name__ == "__main__":
    _sabotage()
    sys.argv = ["anabranch", "worker"]
    main()
