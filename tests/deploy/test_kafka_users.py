"""The Kafka users of k8s/components/strimzi on Apache Kafka: each can do its work, and uses everything that it may do.

The broker's authorizer logs the rule that allowed a request, so a rule that nothing needs is found.
"""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import TopicAuthorizationFailedError
from aiokafka.protocol.admin import CreateAclsRequest
from aiokafka.structs import TopicPartition

from streams.broker.clients import running_producer
from streams.broker.publisher import Publisher
from streams.broker.topic_ids import TopicProbe
from streams.broker.topics import create_topics
from streams.client import Client, ConnectionFailed
from streams.configured import required_topics
from streams.core.replies import ReplyRefused, ReplyTarget, reply_request_headers
from streams.settings import EmbedderSettings, load, load_embedder
from streams.worker.replies import ReplyTopics
from tests.conftest import Database
from tests.embedding.imitation import imitation
from tests.integration.corpora import load as load_corpus
from tests.integration.corpora import tiny_corpus, unit_vectors
from tests.integration.embedder.stages import question
from tests.integration.harness import Channel, Worker, as_json, query
from tests.integration.kafka.apache_kafka import ApacheKafka, NodePorts, free_ports

pytestmark = pytest.mark.slow

PASSWORD = "password"
# Of the protocol: KIP-140 and KIP-290.
RESOURCES = {"topic": 2, "group": 3}
PATTERNS = {"literal": 3, "prefix": 4}
OPERATIONS = {"Read": 3, "Write": 4, "Create": 5, "Describe": 8, "DescribeConfigs": 10}
ALLOW = 3
PARTITIONS = 2
# The embedding stage's topics have their default names.
TEXTS = EmbedderSettings()


@dataclass(frozen=True)
class Rule:
    """What one user may do with one resource."""

    user: str
    resource: str
    name: str
    pattern: str
    operation: str


@pytest.fixture(scope="module")
def rules(render_kubernetes: Callable[[str], list[dict[str, Any]]]) -> set[Rule]:
    return {
        Rule(
            user["metadata"]["name"],
            acl["resource"]["type"],
            acl["resource"]["name"],
            acl["resource"]["patternType"],
            operation,
        )
        for user in render_kubernetes("overlays/production-embedder/kafka")
        if user["kind"] == "KafkaUser"
        for acl in user["spec"]["authorization"]["acls"]
        for operation in acl["operations"]
    }


@pytest.fixture(scope="module")
def values(render_kubernetes: Callable[[str], list[dict[str, Any]]]) -> dict[str, str]:
    """The workers' settings in production."""
    (found,) = (
        manifest["data"]
        for manifest in render_kubernetes("overlays/production")
        if manifest["kind"] == "ConfigMap"
    )
    return dict(found)


@dataclass(frozen=True)
class Broker:
    """Apache Kafka, and where one logs in."""

    kafka: ApacheKafka
    listener: str


@pytest.fixture(scope="module")
def broker(kafka_jars: Path, rules: set[Rule], values: Mapping[str, str]) -> Iterator[Broker]:
    """A broker with the users, their rules, and the topics. Whoever does not log in is the administrator."""
    ports = NodePorts(1, *free_ports(2))
    listener = f"127.0.0.1:{free_ports(1)[0]}"
    listeners = f"PLAINTEXT://127.0.0.1:{ports.port},SASL_PLAINTEXT://{listener}"
    kinds = {"PLAINTEXT": "PLAINTEXT", "SASL_PLAINTEXT": "SASL_PLAINTEXT", "CONTROLLER": "PLAINTEXT"}
    users = " ".join(f'user_{user}="{PASSWORD}"' for user in sorted({rule.user for rule in rules}))
    login = "org.apache.kafka.common.security.plain.PlainLoginModule"
    kafka = ApacheKafka(
        kafka_jars,
        node_ports=ports,
        settings={
            "listeners": f"{listeners},CONTROLLER://127.0.0.1:{ports.controller_port}",
            "advertised.listeners": listeners,
            "listener.security.protocol.map": ",".join(
                f"{kind}:{protocol}" for kind, protocol in kinds.items()
            ),
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.name.sasl_plaintext.plain.sasl.jaas.config": f"{login} required {users};",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
        },
    )
    with pytest.MonkeyPatch.context() as patch:
        # Which rule allowed a request is logged at this level.
        patch.setenv("JAVA_TOOL_OPTIONS", "-Dorg.slf4j.simpleLogger.log.kafka.authorizer.logger=debug")
        with kafka:
            asyncio.run(_set_up(kafka, rules, values))
            yield Broker(kafka, listener)


async def _set_up(kafka: ApacheKafka, rules: set[Rule], values: Mapping[str, str]) -> None:
    environment = {**values, "KAFKA_SASL_PASSWORD": PASSWORD}
    await create_topics(
        {"bootstrap_servers": kafka.bootstrap_servers},
        required_topics(
            load(environment),
            load_embedder(environment)[0],
            partitions=PARTITIONS,
            replication_factor=1,
            max_event_bytes=1024 * 1024,
        ),
    )
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap_servers)
    await admin.start()
    try:
        for rule in rules:
            response = await admin._send_request(
                CreateAclsRequest(
                    RESOURCES[rule.resource],
                    rule.name,
                    PATTERNS[rule.pattern],
                    f"User:{rule.user}",
                    "*",
                    OPERATIONS[rule.operation],
                    ALLOW,
                )
            )
            assert [code for code, _ in response.creation_responses] == [0], response
    finally:
        await admin.close()


def _options(broker: Broker, user: str) -> dict[str, Any]:
    """Of a client that logs in as this user."""
    return {
        "bootstrap_servers": broker.listener,
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "PLAIN",
        "sasl_plain_username": user,
        "sasl_plain_password": PASSWORD,
    }


def _settings(broker: Broker, user: str, values: Mapping[str, str]) -> dict[str, str]:
    """Of a command that logs in as this user."""
    topics = ("INPUT_TOPIC", "OUTPUT_TOPIC", "DEAD_LETTER_TOPIC", "REPLY_TOPICS")
    return {
        **{f"ANABRANCH_{name}": values[f"ANABRANCH_{name}"] for name in (*topics, "CONSUMER_GROUP")},
        "KAFKA_BOOTSTRAP_SERVERS": broker.listener,
        "KAFKA_SECURITY_PROTOCOL": "SASL_PLAINTEXT",
        "KAFKA_SASL_MECHANISM": "PLAIN",
        "KAFKA_SASL_USERNAME": user,
        "KAFKA_SASL_PASSWORD": PASSWORD,
    }


def _decided(log: str, what: str) -> Iterator[tuple[str, str]]:
    """User, and the rest of the line."""
    return ((match[1], match[2]) for match in re.finditer(rf"User:([\w-]+) is {what} (.*)", log))


def _used(log: str) -> set[Rule]:
    """The rules that were needed: those that allowed just what they name, not something that this includes."""
    operations = {re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper(): name for name in OPERATIONS}
    patterns = {"LITERAL": "literal", "PREFIXED": "prefix"}
    found = set()
    for user, line in _decided(log, "Allowed operation"):
        rule = dict(re.findall(r"(\w+)=([^,\]]+)", line.partition("StandardAcl[")[2]))
        if rule and line.startswith(f"= {rule['operation']} "):
            found.add(
                Rule(
                    user,
                    rule["resourceType"].lower(),
                    rule["resourceName"],
                    patterns[rule["patternType"]],
                    operations[rule["operation"]],
                )
            )
    return found


async def test_each_user_can_do_its_work_and_uses_all_its_rights(
    *,
    broker: Broker,
    rules: set[Rule],
    values: Mapping[str, str],
    database: Database,
    root: Path,
    tmp_path: Path,
) -> None:
    async def command(user: str, *arguments: str, given: str = "") -> str:
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "streams", *arguments],
            cwd=root,
            env=_settings(broker, user, values),
            input=given,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{user}: {arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    # The store, and the worker, of which KEDA asks how much waits.
    await load_corpus(database.writer, tiny_corpus())
    channel = Channel(broker.kafka.bootstrap_servers, "unused", cast(Any, None))
    worker = Worker(
        tmp_path / "worker.log", channel, database.worker, _settings(broker, "retrieval-worker", values)
    )
    try:
        await worker.until_ready()
        assert "exists" in await command("retrieval-topics", "topics", "--texts")
        vector = unit_vectors(1, 1)[0]
        answered = query(vector, profile="docs")
        await command("retrieval-producer", "publish", given=json.dumps(answered))
        await command("retrieval-producer", "publish", given=json.dumps(query(vector, profile="unknown")))
        shown = await command("retrieval-consumer", "tail", "--from-beginning", "--limit", "1")
        assert json.loads(shown)["event_id"] == answered["event_id"]
        await _consume_in_a_group(broker, values["ANABRANCH_OUTPUT_TOPIC"])
        await _ask_for_a_reply(
            broker,
            values,
            "retrieval-producer",
            values["ANABRANCH_INPUT_TOPIC"],
            query(vector, profile="docs"),
        )
        await _consume_in_a_group(broker, values["ANABRANCH_REPLY_TOPICS"])
        options = ("--dead-letters", "--from-beginning", "--limit", "1")
        assert "unknown_profile" in await command("retrieval-operator", "tail", *options)
        await command("retrieval-operator", "replay", "--apply", "--code", "unknown_profile")
        # The replayed event is dead-lettered again.
        options = (*options[:-1], "2")
        assert (await command("retrieval-operator", "tail", *options)).count("unknown_profile") >= 2
        await _lag(broker, values)
        await _ask_in_words(broker, values, channel, tmp_path, command)
    finally:
        code, _ = await worker.terminate()
    assert code == 0
    assert [denied for denied in _decided(broker.kafka.log, "Denied") if denied[0] != "ANONYMOUS"] == []
    assert _used(broker.kafka.log) == rules


async def _ask_for_a_reply(
    broker: Broker, values: Mapping[str, str], user: str, topic: str, event: Mapping[str, Any]
) -> None:
    request = reply_request_headers(ReplyTarget(values["ANABRANCH_REPLY_TOPICS"], 0), b"1")
    async with running_producer(_options(broker, user)) as producer:
        await producer.send_and_wait(topic, as_json(event), headers=list(request))


async def _ask_in_words(
    broker: Broker, values: Mapping[str, str], channel: Channel, folder: Path, command: Any
) -> None:
    """A question and empty ones through the embedding stage: one is replayed, another one's sender wants a reply."""
    async with imitation() as server:
        server.dimensions = 768
        embedder = Worker(
            folder / "embedder.log",
            channel,
            None,
            _settings(broker, "retrieval-embedder", values)
            | {
                "ANABRANCH_EMBEDDING_PROVIDER": "openai",
                "ANABRANCH_EMBEDDING_MODEL": "some-model",
                "ANABRANCH_EMBEDDING_BASE_URL": f"{server.url}/openai/v1",
                "ANABRANCH_EMBEDDING_API_KEY": server.key,
            },
            ("-m", "streams", "embedder"),
        )
        try:
            await embedder.until_ready()
            asked = question("What moves an estuary?")
            for each in (asked, question(" ")):
                await command("retrieval-text-producer", "publish", "--texts", given=json.dumps(each))
            shown = await command("retrieval-consumer", "tail", "--from-beginning", "--limit", "3")
            assert asked["event_id"] in shown
            options = ("--dead-letters", "--texts", "--from-beginning", "--limit")
            assert "empty_text" in await command("retrieval-text-operator", "tail", *options, "1")
            await command("retrieval-text-operator", "replay", "--texts", "--apply", "--code", "empty_text")
            shown = await command("retrieval-text-operator", "tail", *options, "2")
            assert shown.count("empty_text") >= 2
            await _ask_for_a_reply(
                broker, values, "retrieval-text-producer", TEXTS.anabranch_text_topic, question(" ")
            )
            shown = await command("retrieval-text-operator", "tail", *options, "3")
            assert shown.count("empty_text") >= 3
        finally:
            code, _ = await embedder.terminate()
        assert code == 0


async def _consume_in_a_group(broker: Broker, topic: str) -> None:
    """As a back end would."""
    consumer = AIOKafkaConsumer(
        topic,
        **_options(broker, "retrieval-consumer"),
        group_id="retrieval-consumer-of-one-back-end",
        auto_offset_reset="earliest",
    )
    await consumer.start()
    try:
        await asyncio.wait_for(consumer.getone(), 30)
        await consumer.commit()
    finally:
        await consumer.stop()


async def _lag(broker: Broker, values: Mapping[str, str]) -> None:
    """As KEDA's scaler reads it: the topic's partitions, the group's offsets, the partitions' ends."""
    topic, user = values["ANABRANCH_INPUT_TOPIC"], "retrieval-worker"
    admin = AIOKafkaAdminClient(**_options(broker, user))
    consumer = AIOKafkaConsumer(**_options(broker, user))
    await admin.start()
    await consumer.start()
    try:
        [description] = await admin.describe_topics([topic])
        assert len(description["partitions"]) == PARTITIONS
        offsets = await admin.list_consumer_group_offsets(values["ANABRANCH_CONSUMER_GROUP"])
        assert {partition.topic for partition in offsets} == {topic}
        partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
        assert sum((await consumer.end_offsets(partitions)).values()) >= 2
    finally:
        await consumer.stop()
        await admin.close()


@pytest.mark.parametrize(
    "user",
    [
        *("retrieval-worker", "retrieval-consumer", "retrieval-topics", "retrieval-operator"),
        *("retrieval-embedder", "retrieval-text-producer", "retrieval-text-operator"),
    ],
)
async def test_nobody_else_may_write(
    broker: Broker, rules: set[Rule], values: Mapping[str, str], user: str
) -> None:
    """Anyone who can write to the input topic, or to that of questions, can claim any principal."""
    producer = AIOKafkaProducer(**_options(broker, user))
    await producer.start()
    try:
        for topic in (
            values["ANABRANCH_INPUT_TOPIC"],
            values["ANABRANCH_OUTPUT_TOPIC"],
            values["ANABRANCH_REPLY_TOPICS"],
            TEXTS.anabranch_text_topic,
        ):
            if Rule(user, "topic", topic, "literal", "Write") in rules:
                await producer.send_and_wait(topic, b"{}")
            else:
                with pytest.raises(TopicAuthorizationFailedError):
                    await producer.send_and_wait(topic, b"{}")
    finally:
        await producer.stop()


@pytest.mark.parametrize("user", ["retrieval-producer", "retrieval-consumer"])
async def test_a_worker_that_may_not_write_replies_is_not_held_up(
    broker: Broker, values: Mapping[str, str], user: str
) -> None:
    """One that may not see the topic, and one that may only read it."""
    topic, options = values["ANABRANCH_REPLY_TOPICS"], _options(broker, user)
    probe = TopicProbe(options, [topic], timeout_seconds=5)
    errors: list[BaseException] = []
    publisher = Publisher(
        options, on_fault=errors.append, on_success=lambda: None, wait_seconds=(1, 1), connect_first=False
    )
    try:
        with pytest.raises(ReplyRefused, match=r"^reply_not_authorized$"):
            await publisher.publish_reply(
                ReplyTarget(topic, 0), None, b"", [], check=ReplyTopics(probe.fetch_partitions).check
            )
    finally:
        await publisher.on_stop()
        await probe.close()
    assert errors == []


@pytest.mark.parametrize(
    ("user", "message"),
    [
        ("retrieval-worker", "Kafka does not allow this client to publish"),
        ("retrieval-consumer", "missing topic"),  # Kafka does not show it to whom may not use it
    ],
)
async def test_a_client_that_may_not_publish_does_not_wait_for_its_timeout(
    broker: Broker, values: Mapping[str, str], user: str, message: str
) -> None:
    async with Client.from_environment(_settings(broker, user, values)) as client:
        with pytest.raises(ConnectionFailed, match=message):
            await client.publish(embedding=[1.0] * 768, principals=["user:1"], timeout=None)


async def test_a_worker_cannot_read_results(broker: Broker, values: Mapping[str, str]) -> None:
    """Although it writes them: whoever takes its login sees no more than what is asked from then on."""
    consumer = AIOKafkaConsumer(**_options(broker, "retrieval-worker"), auto_offset_reset="earliest")
    await consumer.start()
    try:
        consumer.assign([TopicPartition(values["ANABRANCH_OUTPUT_TOPIC"], 0)])
        with pytest.raises(TopicAuthorizationFailedError):
            await asyncio.wait_for(consumer.getone(), 30)
    finally:
        await consumer.stop()


def test_who_reads_results_and_who_asks(rules: set[Rule], values: Mapping[str, str]) -> None:
    """Anyone who can write to the input topic can claim any principal."""

    def users(topic: str, operation: str) -> set[str]:
        return {rule.user for rule in rules if (rule.name, rule.operation) == (topic, operation)}

    events, texts = values["ANABRANCH_INPUT_TOPIC"], TEXTS.anabranch_text_topic
    assert users(values["ANABRANCH_OUTPUT_TOPIC"], "Read") == {"retrieval-consumer"}
    assert users(values["ANABRANCH_REPLY_TOPICS"], "Read") == {"retrieval-consumer"}
    assert users(values["ANABRANCH_REPLY_TOPICS"], "Write") == {"retrieval-worker", "retrieval-embedder"}
    assert users(events, "Write") == {"retrieval-producer", "retrieval-operator", "retrieval-embedder"}
    assert users(events, "Read") == {"retrieval-worker"}
    assert users(texts, "Write") == {"retrieval-text-producer", "retrieval-text-operator"}
    assert users(texts, "Read") == {"retrieval-embedder"}
