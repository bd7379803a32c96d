"""PostgreSQL or Kafka stops answering, for all workers or for one of two."""

from typing import Final

import psutil

from tests.ops.installation import Installation
from tests.ops.judge import Expectation
from tests.ops.scenario import Scenario

__all__ = [
    "BROKER_FROZEN",
    "CONSEQUENCES",
    "SCENARIOS",
    "STORE_FROZEN",
    "TWO_INSTALLATIONS",
    "WORKER_CUT_OFF",
]

_STORE: Final = "PostgreSQL down, frozen or misconfigured"
# Stuck partitions count as events that are not answered. Those that a worker had fetched took long: of an hour's
# events, an outage of 7 minutes delays less than the 14.4 % that page, but Prometheus knows only some minutes here.
CONSEQUENCES: Final = frozenset({"AvailabilityBurn", "DurationBurn"})


async def freeze_store(installation: Installation) -> None:
    """Every process of PostgreSQL stands still: connections stay open, and nothing comes."""
    postmaster = psutil.Process(installation.stack.store.embedded.pid)
    postmaster.suspend()
    installation.frozen = [postmaster, *postmaster.children(recursive=True)]
    for process in installation.frozen:
        process.suspend()
    await installation.until_noticed(installation.stack.members)


async def freeze_broker(installation: Installation) -> None:
    """The only broker stands still."""
    broker = psutil.Process(installation.stack.cluster.kafka.brokers[0].pid)
    broker.suspend()
    installation.frozen = [broker]
    await installation.until_noticed(installation.stack.members)


async def thaw(installation: Installation) -> None:
    """The runbook: restore PostgreSQL or Kafka. The workers need no restart."""
    for process in installation.frozen:
        process.resume()
    installation.frozen.clear()


async def start_one_behind_proxy(installation: Installation) -> None:
    installation.start_behind_proxy()
    installation.stack.start_worker()


async def cut_off_store(installation: Installation) -> None:
    installation.own_proxy.cut()
    await installation.until_noticed(installation.stack.members[:1])


async def cut_off_all(installation: Installation) -> None:
    installation.stack.store_proxy.cut()
    await installation.until_noticed(installation.stack.members)


async def restore_all(installation: Installation) -> None:
    """The runbook: restore PostgreSQL, or the way to it."""
    installation.stack.repair()


async def restore_connection(installation: Installation) -> None:
    """The runbook: restore its connections."""
    installation.own_proxy.repair()


STORE_FROZEN = Scenario(
    "store-frozen",
    Expectation(
        {"NoneReady": 3, "WorkerStuck": 5, "PartitionStuck": 5}, CONSEQUENCES, state=2, state_within=3
    ),
    freeze_store,
    thaw,
    own_store=True,
    runbook=_STORE,
)
WORKER_CUT_OFF = Scenario(
    "one-of-two-cut-off",
    Expectation(
        {"WorkerStuck": 5, "PartitionStuck": 5, "FewerReady": 14}, CONSEQUENCES, state=1, state_within=5
    ),
    cut_off_store,
    restore_connection,
    start=start_one_behind_proxy,
    fault_minutes=14,
    runbook="one worker cut off from PostgreSQL",
)
BROKER_FROZEN = Scenario(
    "broker-frozen",
    # What a worker had fetched waits. How many events these are depends on the moment.
    Expectation({"NoneReady": 3}, CONSEQUENCES | {"PartitionStuck", "WorkerStuck"}, state=2, state_within=3),
    freeze_broker,
    thaw,
    own_broker=True,
    runbook="Kafka down or frozen",
)
# Both have the same job. The other one is well, and must stay so in every panel and alert.
TWO_INSTALLATIONS = Scenario(
    "two-installations",
    STORE_FROZEN.expected,
    cut_off_all,
    restore_all,
    beside=True,
    runbook=_STORE,
)
SCENARIOS = [STORE_FROZEN, WORKER_CUT_OFF, BROKER_FROZEN, TWO_INSTALLATIONS]
