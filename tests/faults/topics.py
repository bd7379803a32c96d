"""The input topic is missing when the workers start, or is deleted and created again under them."""

import asyncio
import json
from functools import partial

from aiokafka.admin import AIOKafkaAdminClient

from streams.broker.topics import create_topics
from tests.faults.fault import REPEATS_OF_A_MEMBER, Fault
from tests.faults.stack import Stack
from tests.integration.harness import Worker, topic_specs_of, until

__all__ = ["FAULTS"]

_NOTICED = "was deleted and created again"
_NOTICED_SECONDS = 15.0


async def late(stack: Stack) -> None:
    """Nobody is there when the topic goes, and it is not there when somebody comes."""
    for worker in stack.members:
        worker.kill()
    await _delete(stack)
    for worker in list(stack.members):
        stack.replace(worker)
    await _until_named(stack)
    await asyncio.sleep(stack.rng.uniform(1, 4))
    await _create(stack)


async def recreated(stack: Stack) -> None:
    """At once, so that the workers find a topic of the same name, and go on committing to it.

    Until they have noticed, the lag says nothing: it is counted from what is committed of the old topic.
    """
    noticed = {worker: worker.log.count(_NOTICED) + 1 for worker in stack.members}
    await _delete(stack)
    await _create(stack)
    for worker, times in noticed.items():
        await until(partial(_has_noticed, worker, times), lambda: stack.logs, seconds=_NOTICED_SECONDS)


def _has_noticed(worker: Worker, times: int) -> bool:
    return worker.log.count(_NOTICED) >= times


async def recreated_later(stack: Stack) -> None:
    """After the workers have noticed that it is missing."""
    await _delete(stack)
    await _until_named(stack)
    await _create(stack)


async def _delete(stack: Stack) -> None:
    client = AIOKafkaAdminClient(bootstrap_servers=stack.channel.bootstrap_servers)
    await client.start()
    try:
        [(_, code)] = (await client.delete_topics([stack.channel.input])).topic_error_codes
        assert code == 0
    finally:
        await client.close()


async def _create(stack: Stack) -> None:
    specs = [spec for spec in topic_specs_of(stack.channel) if spec.name == stack.channel.input]
    await create_topics({"bootstrap_servers": stack.channel.bootstrap_servers}, specs)
    # What was asked until now may have been deleted with the topic; what the new one holds has to be answered.
    stack.forget_input()


async def _until_named(stack: Stack) -> None:
    def names(worker: Worker) -> bool:
        status, body = worker.page("/healthz/ready")
        return status == 503 and json.loads(body)["missing_topics"] == [stack.channel.input]

    for worker in stack.members:
        await until(partial(names, worker), lambda: stack.logs, seconds=_NOTICED_SECONDS)


FAULTS = [
    Fault("topic-late", late, rounds=2, limit_seconds=30, repeats=2 * REPEATS_OF_A_MEMBER),
    Fault("topic-recreated", recreated, rounds=2, limit_seconds=30, repeats=2 * REPEATS_OF_A_MEMBER),
    Fault(
        "topic-recreated-later", recreated_later, rounds=2, limit_seconds=30, repeats=2 * REPEATS_OF_A_MEMBER
    ),
]
