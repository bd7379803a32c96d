"""The three topics: what they must be like, and how to make them so."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import TopicAlreadyExistsError, for_code

__all__ = [
    "DEAD_LETTER_MARGIN_BYTES",
    "TopicFinding",
    "TopicSpec",
    "check_topics",
    "create_topics",
    "partitions_of",
    "topic_specs",
]

# What a dead letter's own headers may take, so that any event that came in can be put there.
DEAD_LETTER_MARGIN_BYTES = 64 * 1024

_DAY_MS = 24 * 60 * 60 * 1000


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """What a topic is to be like.

    Attributes:
        config: the broker's own names and values.
        floors: of the config, those that an existing topic must at least have.
    """

    name: str
    partitions: int
    replication_factor: int
    config: Mapping[str, str]
    floors: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class TopicFinding:
    """What was found about one topic.

    Attributes:
        ok: it is there, and not too small.
        created: by this call.
        detail: one line.
        remedy: what to do; empty where all is well.
        max_message_bytes: the largest record it takes; None where the broker does not tell.
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
    """The three topics. Dead letters are kept four times as long as events: somebody has to look at them."""

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
    """Create those that are missing, and look at all of them. Existing topics are never changed.

    Raises:
        KafkaError: the broker cannot be reached or refuses.
    """
    client = AIOKafkaAdminClient(**options)
    await client.start()
    try:
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
        return [await _look(client, spec, created=spec.name in created) for spec in specs]
    finally:
        await client.close()


async def check_topics(options: dict[str, Any], specs: list[TopicSpec]) -> list[TopicFinding]:
    """Look at the topics; change nothing.

    Raises:
        KafkaError: the broker cannot be reached or refuses.
    """
    client = AIOKafkaAdminClient(**options)
    await client.start()
    try:
        missing = {spec.name for spec in await _missing(client, specs)}
        return [
            TopicFinding(spec.name, ok=False, created=False, detail="is missing", remedy="anabranch topics")
            if spec.name in missing
            else await _look(client, spec, created=False)
            for spec in specs
        ]
    finally:
        await client.close()


async def partitions_of(options: Mapping[str, Any], topics: Iterable[str]) -> dict[str, list[int]]:
    """Each topic's partitions, in order; a topic that does not exist is left out, and not created by the question.

    Raises:
        KafkaError: the broker cannot be reached or refuses.
    """
    client = AIOKafkaAdminClient(**options)
    await client.start()
    try:
        present = set(await client.list_topics())
        wanted = [topic for topic in topics if topic in present]
        found = {}
        for description in await client.describe_topics(wanted) if wanted else ():
            if description["error_code"]:
                raise for_code(description["error_code"])(description["topic"])
            found[description["topic"]] = sorted(entry["partition"] for entry in description["partitions"])
        return found
    finally:
        await client.close()


async def _missing(client: AIOKafkaAdminClient, specs: list[TopicSpec]) -> list[TopicSpec]:
    present = set(await client.list_topics())
    return [spec for spec in specs if spec.name not in present]


async def _look(client: AIOKafkaAdminClient, spec: TopicSpec, *, created: bool) -> TopicFinding:
    [description] = await client.describe_topics([spec.name])
    partitions = len(description["partitions"])
    config = await _config(client, spec.name)
    small = {
        name: config[name]
        for name, floor in spec.floors.items()
        if name in config and config[name].isdigit() and int(config[name]) < floor
    }
    detail = f"{'created' if created else 'is there'}, {partitions} partition{'s' if partitions != 1 else ''}"
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
    """Name → value, as far as the broker tells; the embedded one tells what it was told."""
    responses = await client.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
    return {
        entry[0]: entry[1] or ""
        for response in responses
        for resource in response.resources
        if not resource[0]
        for entry in resource[4]
    }
