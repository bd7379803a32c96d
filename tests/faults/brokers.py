"""Faults of Kafka's brokers: restarted, killed, one of three dead, a full disk."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.faults.fault import REPEATS_OF_A_MEMBER, CannotBeHad, Fault
from tests.faults.stack import Stack

__all__ = ["FAULTS", "small_disk"]

_DISK_MIB = 256


async def restart(stack: Stack) -> None:
    """The only broker ends in order, and comes back."""
    await _away(stack, kill=False)


async def kill(stack: Stack) -> None:
    """The only broker is killed, and comes back."""
    await _away(stack, kill=True)


async def _away(stack: Stack, *, kill: bool) -> None:
    async with stack.broker_process:
        broker = stack.rng.choice(stack.cluster.kafka.brokers)
        await asyncio.to_thread(broker.stop, kill=kill)
        await asyncio.sleep(stack.rng.uniform(0.5, 3))
        await asyncio.to_thread(broker.start)


async def one_of_three(stack: Stack) -> None:
    """One of three is killed and stays dead for a while, during which the others serve."""
    async with stack.broker_process:
        broker = stack.rng.choice(stack.cluster.kafka.brokers)
        await asyncio.to_thread(broker.stop, kill=True)
        try:
            await asyncio.sleep(8)  # longer than the broker's own session, and a new leader's election
            before = len(stack.output_reader.results)
            await asyncio.sleep(5)
            assert len(stack.output_reader.results) > before, "nothing is answered while one of three is dead"
        finally:
            await asyncio.to_thread(broker.start)


@contextmanager
def small_disk() -> Iterator[Path]:
    """A file system of its own, in memory, that can be filled.

    Raises:
        CannotBeHad: this user may not mount one.
    """
    if os.geteuid() != 0 or shutil.which("mount") is None:
        raise CannotBeHad("only root may mount a small file system")
    with TemporaryDirectory(prefix="anabranch-disk-") as folder:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MIB}m", "none", folder],
            capture_output=True,
            text=True,
            check=False,
        )
        if mounted.returncode != 0:
            raise CannotBeHad(f"a small file system cannot be mounted: {mounted.stderr.strip()}")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


async def fill_disk(stack: Stack) -> None:
    """The broker's disk is full, until somebody makes room and starts it again: it ends itself over that."""
    assert stack.cluster.data is not None
    broker = stack.cluster.kafka.brokers[0]
    ballast = stack.cluster.data.parent / "ballast"
    with ballast.open("wb") as file:
        try:
            while True:
                file.write(b"\0" * (1 << 20))
                file.flush()
        except OSError:
            pass
    for _ in range(200):
        if not broker.is_running:
            break
        await asyncio.sleep(0.1)
    reported = "No space left on device" in broker.log or "InternalError" in broker.log
    assert reported, "the broker did not notice that its disk is full"
    await asyncio.sleep(2)
    ballast.unlink()
    if broker.is_running:
        await asyncio.to_thread(broker.stop, kill=True)
    await asyncio.to_thread(broker.start)


FAULTS = [
    Fault(
        "broker-restart",
        restart,
        rounds=3,
        limit_seconds=60,
        repeats=2 * REPEATS_OF_A_MEMBER,
        combinable=True,
    ),
    Fault("broker-kill", kill, rounds=3, limit_seconds=60, repeats=2 * REPEATS_OF_A_MEMBER, combinable=True),
    Fault(
        "broker-one-of-three-dead",
        one_of_three,
        rounds=3,
        brokers=3,
        limit_seconds=60,
        repeats=2 * REPEATS_OF_A_MEMBER,
    ),
    Fault("broker-disk-full", fill_disk, limit_seconds=60, repeats=2 * REPEATS_OF_A_MEMBER, disk=small_disk),
]
