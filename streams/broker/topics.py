"""The three topics: their required configuration, and how to create them."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import TopicAlreadyExistsError, for_code

from streams.broker.clients import running_admin

__all__ = [
    "DEAD_LETTER_MARGIN_BYTES",
    "MissingTopics",
    "TopicFinding",
    "TopicSpec",
    "check_topics",
    "create_topics",
    "partitions_of",
    "topic_specs",
]

# Reserved for a dead letter's own headers, so that every accepted event fits on the dead-letter topic.
DEAD_LETTER_MARGIN_BYTES = 64 * 1024

_DAY_MS = 24 * 60 * 60 * 1000
_MAX_PARTITION_CHECKS, _CHECK_INTERVAL_SECONDS = 50, 0.1


class MissingTopics(Exception):
    """Required topics do not exist; the message is one line with the remedy."""

    def __init__(self, topics: Iterable[str]) -> None:
        names = sorted(topics)
        super().__init__(
            f"missing topic{'' if len(names) == 1 else 's'}: {', '.join(names)}; run `anabranch topics` to create"
            f" {'it' if len(names) == 1 else 'them'}"
        )


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """The required configuration of a topic.

    Attributes:
        config: the broker's option names and values.
        floors: minimum values for an existing topic's options.
    """

    name: str
    partitions: int
    replication_factor: int
    config: Mapping[str, str]
    floors: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class TopicFinding:
    """The state of one topic.

    Attributes:
        ok: it exists, and its limits are not too small.
        created: whether this call created it.
        detail: one line.
        remedy: what to do; empty if nothing is wrong.
        max_message_bytes: the largest record it accepts; None if the broker does not report it.
    """

    topic: str
    ok: bool
    created: bool
    detail: str
    remedy: str
    max_message_bytes: int | None = None


def topic_specs(
    *,
    input_topic: str,
    output_topic: str,
    dead_letter_topic: str,
    partitions: int,
    replication_factor: int,
    max_event_bytes: int,
) -> list[TopicSpec]:
    """The three topics. Dead letters are kept four times as long as events, because people have to inspect them."""

    def spec(name: str, bytes_: int, days: int) -> TopicSpec:
        return TopicSpec(
            name,
            partitions,
            replication_factor,
            {
                "cleanup.policy": "delete",
                "retention.ms": str(days * _DAY_MS),
                "max.message.bytes": str(bytes_),
            },
            {"max.message.bytes": bytes_},
        )

    return [
        spec(input_topic, max_event_bytes, 7),
        spec(output_topic, max_event_bytes, 7),
        spec(dead_letter_topic, max_event_bytes + DEAD_LETTER_MARGIN_BYTES, 28),
    ]


async def create_topics(options: dict[str, Any], specs: list[TopicSpec]) -> list[TopicFinding]:
    """Create missing topics and inspect all of them. Never changes existing topics.

    Raises:
        KafkaError: the broker is unreachable or rejects the request.
    """
    async with running_admin(options) as client:
        missing = await _missing(client, specs)
        created = set()
        for spec in missing:
            response = await client.create_topics(
                [
                    NewTopic(
                        spec.name, spec.partitions, spec.replication_factor, topic_configs=dict(spec.config)
                    )
                ]
            )
            for _, code, *_ in response.topic_errors:
                if code and for_code(code) is not TopicAlreadyExistsError:
                    raise for_code(code)(f"cannot create {spec.name}")
            created.add(spec.name)
        return [await _inspect_topic(client, spec, created=spec.name in created) for spec in specs]


async def check_topics(options: dict[str, Any], specs: list[TopicSpec]) -> list[TopicFinding]:
    """Inspect the topics without changing anything.

    Raises:
        KafkaError: the broker is unreachable or rejects the request.
    """
    async with running_admin(options) as client:
        missing = {spec.name for spec in await _missing(client, specs)}
        return [
            TopicFinding(spec.name, ok=False, created=False, detail="is missing", remedy="anabranch topics")
            if spec.name in missing
            else await _inspect_topic(client, spec, created=False)
            for spec in specs
        ]


async def partitions_of(options: Mapping[str, Any], topics: Iterable[str]) -> dict[str, list[int]]:
    """Each topic's partitions, sorted. Does not create missing topics.

    Raises:
        MissingTopics: at least one topic does not exist.
        KafkaError: the broker is unreachable or rejects the request.
    """
    async with running_admin(options) as client:
        wanted = sorted(set(topics))
        if missing := set(wanted) - set(await client.list_topics()):
            raise MissingTopics(missing)
        found = {}
        for description in await client.describe_topics(wanted):
            if description["error_code"]:
                raise for_code(description["error_code"])(description["topic"])
            found[description["topic"]] = sorted(entry["partition"] for entry in description["partitions"])
        return found


async def _missing(client: AIOKafkaAdminClient, specs: list[TopicSpec]) -> list[TopicSpec]:
    present = set(await client.list_topics())
    return [spec for spec in specs if spec.name not in present]


async def _inspect_topic(client: AIOKafkaAdminClient, spec: TopicSpec, *, created: bool) -> TopicFinding:
    # A broker may list a topic that was just created before it knows the topic's partitions.
    for _ in range(_MAX_PARTITION_CHECKS):
        [description] = await client.describe_topics([spec.name])
        if description["partitions"]:
            break
        await asyncio.sleep(_CHECK_INTERVAL_SECONDS)
    partitions = len(description["partitions"])
    config = await _config(client, spec.name)
    small = {
        name: config[name]
        for name, floor in spec.floors.items()
        if name in config and config[name].isdigit() and int(config[name]) < floor
    }
    detail = f"{'created' if created else 'exists'}, {partitions} partition{'s' if partitions != 1 else ''}"
    if not small:
        return TopicFinding(
            spec.name, ok=True, created=created, detail=detail, remedy="", max_message_bytes=_number(config)
        )
    wanted = ",".join(f"{name}={spec.floors[name]}" for name in small)
    return TopicFinding(
        spec.name,
        ok=False,
        created=created,
        detail=detail + "; too small: " + ", ".join(f"{name}={value}" for name, value in small.items()),
        remedy=f"kafka-configs.sh --alter --entity-type topics --entity-name {spec.name} --add-config {wanted}",
        max_message_bytes=_number(config),
    )


def _number(config: Mapping[str, str]) -> int | None:
    value = config.get("max.message.bytes", "")
    return int(value) if value.isdigit() else None


async def _config(client: AIOKafkaAdminClient, topic: str) -> dict[str, str]:
    """Name → value, as far as the broker reports them; the embedded broker returns the values it was created with."""
    responses = await client.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
    return {
        entry[0]: entry[1] or ""
        for response in responses
        for resource in response.resources
        if not resource[0]
        for entry in resource[4]
    }
