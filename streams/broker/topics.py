"""The topics: their required configuration, and how to create them."""

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import InvalidReplicationFactorError, TopicAlreadyExistsError, for_code

from streams.broker.clients import running_admin

__all__ = [
    "DEAD_LETTER_MARGIN_BYTES",
    "Difference",
    "MissingTopics",
    "TopicFinding",
    "TopicNotCreated",
    "TopicSpec",
    "check_topics",
    "create_topics",
    "partitions_of",
    "topic_specs",
]

# Reserved for a dead letter's own headers, so that every accepted event fits on the dead-letter topic.
DEAD_LETTER_MARGIN_BYTES = 64 * 1024

_RETENTION = "retention.ms"
_SIZE = "max.message.bytes"
_HOUR_MS = 60 * 60 * 1000
_DAY_MS = 24 * _HOUR_MS
_MAX_PARTITION_CHECKS, _CHECK_INTERVAL_SECONDS = 50, 0.1


class MissingTopics(Exception):
    """Required topics do not exist; the message is one line with the remedy.

    Args:
        topics: their names.
        texts: whether an embedding stage requires them.
    """

    def __init__(self, topics: Iterable[str], *, texts: bool = False) -> None:
        self.topics = sorted(topics)
        several = len(self.topics) != 1
        super().__init__(
            f"missing topic{'s' if several else ''}: {', '.join(self.topics)};"
            f" run `anabranch topics{' --texts' if texts else ''}` to create {'them' if several else 'it'}"
        )


class TopicNotCreated(Exception):
    """The broker does not create a topic; the message is one line with the reason.

    Args:
        topic: its name.
        code: the broker's error code.
        reason: the broker's own words, if it has any.
    """

    def __init__(self, topic: str, code: int, reason: str | None) -> None:
        error = for_code(code)
        remedy = (
            "; --replication-factor can be at most the number of brokers"
            if error is InvalidReplicationFactorError
            else ""
        )
        super().__init__(f"cannot create {topic}: {(reason or error.__name__).rstrip('.')}{remedy}")


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """The required configuration of a topic.

    Attributes:
        config: the broker's option names and values.
        floors: minimum values for an existing topic's options.
        optional: a worker can do without it.
        texts: whether only an embedding stage requires it.
    """

    name: str
    partitions: int
    replication_factor: int
    config: Mapping[str, str]
    floors: Mapping[str, int]
    optional: bool = False
    texts: bool = False


@dataclass(frozen=True, slots=True)
class Difference:
    """How a topic that works differs from what is wanted.

    Attributes:
        detail: what it is, and what is wanted.
        remedy: the command or option that removes the difference.
    """

    detail: str
    remedy: str


@dataclass(frozen=True, slots=True)
class TopicFinding:
    """The state of one topic.

    Attributes:
        ok: it exists, and its limits are not too small.
        created: whether this call created it.
        detail: one line.
        remedy: what to do; empty if nothing is wrong.
        max_message_bytes: the largest record it accepts; None if the broker does not report it.
        differences: in partitions, replicas, retention and cleanup, as far as the broker reports them.
        optional: a worker can do without it.
    """

    topic: str
    ok: bool
    created: bool
    detail: str
    remedy: str
    max_message_bytes: int | None = None
    optional: bool = False
    differences: Sequence[Difference] = ()


def topic_specs(
    *,
    input_topic: str,
    output_topic: str,
    dead_letter_topic: str,
    partitions: int,
    replication_factor: int,
    max_event_bytes: int,
    reply_topics: Collection[str] = (),
) -> list[TopicSpec]:
    """The three topics, and those for replies.

    Dead letters are kept four times as long as events, because people have to inspect them. Replies are worthless when
    nobody waits for them any more.
    """

    def spec(
        name: str, bytes_: int, retention_ms: int, *, optional: bool = False, **config: str
    ) -> TopicSpec:
        return TopicSpec(
            name,
            partitions,
            replication_factor,
            {
                "cleanup.policy": "delete",
                _RETENTION: str(retention_ms),
                _SIZE: str(bytes_),
                **config,
            },
            {_SIZE: bytes_},
            optional,
        )

    # A segment is deleted only when its last record is old enough, and by default it takes records for a week.
    segments = {"segment.ms": str(_HOUR_MS)}
    return [
        spec(input_topic, max_event_bytes, 7 * _DAY_MS),
        spec(output_topic, max_event_bytes, 7 * _DAY_MS),
        spec(dead_letter_topic, max_event_bytes + DEAD_LETTER_MARGIN_BYTES, 28 * _DAY_MS),
        *(spec(name, max_event_bytes, _HOUR_MS, optional=True, **segments) for name in reply_topics),
    ]


async def create_topics(options: dict[str, Any], specs: list[TopicSpec]) -> list[TopicFinding]:
    """Create missing topics and inspect all of them. Never changes existing topics.

    Raises:
        TopicNotCreated: the broker rejects a topic.
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
            for _, code, *reason in response.topic_errors:
                if code and for_code(code) is not TopicAlreadyExistsError:
                    raise TopicNotCreated(spec.name, code, reason[0] if reason else None)
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
            TopicFinding(
                spec.name,
                ok=False,
                created=False,
                detail="is missing",
                remedy=f"anabranch topics{' --texts' if spec.texts else ''}",
                optional=spec.optional,
            )
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
    config = await _config(client, spec.name)
    partitions = len(description["partitions"])
    replicas = min((len(entry["replicas"]) for entry in description["partitions"]), default=0)
    facts = [_count(partitions, "partition"), _count(replicas, "replica")]
    if retention := config.get(_RETENTION):
        facts.append(f"kept {_duration(retention)}")
    size = config.get(_SIZE, "")
    if size.isdigit():
        facts.append(f"records of up to {int(size):,} bytes")
    detail = f"{'created' if created else 'exists'}, {', '.join(facts)}"
    small = {
        name: config[name]
        for name, floor in spec.floors.items()
        if name in config and config[name].isdigit() and int(config[name]) < floor
    }
    remedy = ""
    if small:
        detail += "; too small: " + ", ".join(f"{name}={value}" for name, value in small.items())
        remedy = _alter(spec.name, ",".join(f"{name}={spec.floors[name]}" for name in small))
    return TopicFinding(
        spec.name,
        ok=not small,
        created=created,
        detail=detail,
        remedy=remedy,
        max_message_bytes=int(size) if size.isdigit() else None,
        optional=spec.optional,
        differences=[*_differences(spec, partitions, replicas, config)],
    )


def _differences(
    spec: TopicSpec, partitions: int, replicas: int, config: Mapping[str, str]
) -> Iterator[Difference]:
    if partitions < spec.partitions:
        remedy = f"kafka-topics.sh --alter --topic {spec.name} --partitions {spec.partitions}"
        yield Difference(
            f"{_count(partitions, 'partition')}, not {spec.partitions}",
            f"{remedy}, or use --partitions {partitions}",
        )
    if partitions > spec.partitions:
        yield Difference(
            f"{partitions} partitions, not {spec.partitions}",
            f"use --partitions {partitions}: Kafka cannot remove partitions",
        )
    if replicas != spec.replication_factor:
        yield Difference(
            f"{_count(replicas, 'replica')}, not {spec.replication_factor}",
            f"use --replication-factor {replicas}, or assign {_count(spec.replication_factor, 'broker')} to each"
            f" partition of {spec.name} with kafka-reassign-partitions.sh",
        )
    for name, wanted in spec.config.items():
        found = config.get(name, wanted)
        if name in spec.floors or found == wanted:
            continue
        detail = f"{name}={found}, not {wanted}"
        if name == _RETENTION:
            detail = f"kept {_duration(found)}, not {_duration(wanted)}"
        yield Difference(detail, _alter(spec.name, f"{name}={wanted}"))


def _alter(topic: str, config: str) -> str:
    return f"kafka-configs.sh --alter --entity-type topics --entity-name {topic} --add-config {config}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _duration(milliseconds: str) -> str:
    """Readable, of a value of retention.ms."""
    if not milliseconds.isdigit():  # -1
        return "indefinitely"
    hours, rest = divmod(int(milliseconds), _HOUR_MS)
    if rest:
        return f"{int(milliseconds)} ms"
    days, rest = divmod(hours, 24)
    return _count(hours, "hour") if rest else _count(days, "day")


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
