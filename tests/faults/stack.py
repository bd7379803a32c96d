"""What a fault befalls: brokers, a store, proxies before both, workers, and load.

Where there are embedding stages, the load is questions in words, and the accounting runs from those to the results.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self
from uuid import uuid4

import asyncpg
from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import GroupLoadInProgressError, KafkaError
from aiokafka.structs import TopicPartition

from streams.embedded.postgres import THROW_AWAY, EmbeddedPostgres
from tests.accounting import Logged, Verdict, account
from tests.conftest import Database, PostgresServer
from tests.embedding.imitation import Imitation, imitation
from tests.faults.load import Event, Load, answer_of, good_events, name_of, names_of, reply_name_of
from tests.faults.proxy import Proxy
from tests.integration.corpora import load as load_corpus
from tests.integration.corpora import tiny_corpus
from tests.integration.embedder.stages import Texts, open_texts
from tests.integration.harness import PARTITIONS, Channel, OutputReader, Worker, open_channel
from tests.integration.kafka.apache_kafka import KafkaCluster, free_ports

__all__ = ["Cluster", "Servers", "Stack", "open_stack"]

#: What the worker may open twice over, and little more: so that its limit can be reached.
MAX_CONNECTIONS = 80
CONCURRENCY = 8
_MAX_BYTES = 4 * 1024 * 1024

# Workers come as somebody whom the broker may refuse; everybody else comes by the other listener, as its administrator.
_KAFKA_SETTINGS = {
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,PROXY:SASL_PLAINTEXT",
    "sasl.enabled.mechanisms": "PLAIN",
    "listener.name.proxy.plain.sasl.jaas.config": (
        'org.apache.kafka.common.security.plain.PlainLoginModule required user_worker="secret";'
    ),
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",
    "allow.everyone.if.no.acl.found": "true",
    # Compaction within seconds, for the tests of gaps in the log.
    "log.cleaner.backoff.ms": "200",
    "log.retention.check.interval.ms": "1000",
}
# Of each call of the provider, so that there is something in flight to interrupt.
_EMBEDDING_SECONDS = 0.05
_WORKER_SETTINGS = {
    "KAFKA_SECURITY_PROTOCOL": "SASL_PLAINTEXT",
    "KAFKA_SASL_MECHANISM": "PLAIN",
    "KAFKA_SASL_USERNAME": "worker",
    "KAFKA_SASL_PASSWORD": "secret",
    "ANABRANCH_CONCURRENCY": str(CONCURRENCY),
    "ANABRANCH_RETRY_BASE_SECONDS": "0.2",
    "ANABRANCH_RETRY_MAX_SECONDS": "2",
}
# A group is never long without a look at it.
_CHECK_INTERVAL_SECONDS = 0.2
_ANSWER_SECONDS = 10.0
# An event that is unanswered, though everything is committed and nothing has come for so long, is lost.
_SILENCE_SECONDS = 5.0
# What load is on its way in one moment, when all is well.
_SECONDS_OF_LOAD = 2.0


class Cluster:
    """Brokers with a proxy before each.

    Args:
        jars: of Kafka.
        brokers: one, or three.
        data: where the first broker keeps its records.
    """

    def __init__(self, jars: Path, *, brokers: int, data: Path | None = None) -> None:
        self.data = data
        self.proxies = [Proxy(port) for port in free_ports(brokers)]
        self.kafka = KafkaCluster(
            jars,
            brokers=brokers,
            settings=_KAFKA_SETTINGS,
            proxy_ports=[proxy.port for proxy in self.proxies],
            data=data,
        )
        for proxy, broker in zip(self.proxies, self.kafka.brokers, strict=True):
            proxy.target = broker.node_ports.proxy_listener

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.kafka.__enter__)
        for proxy in self.proxies:
            await proxy.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        for proxy in self.proxies:
            await proxy.__aexit__()
        await asyncio.to_thread(self.kafka.close)

    @property
    def workers_bootstrap(self) -> str:
        return ",".join(f"127.0.0.1:{proxy.port}" for proxy in self.proxies)

    async def until_up(self) -> None:
        """Starts what a fault has left lying."""
        for broker in self.kafka.brokers:
            if not broker.is_running:
                await asyncio.to_thread(broker.start)


class Servers:
    """What outlives a fault: started when first asked for, and ended together."""

    def __init__(self, jars: Path, *, store_settings: Mapping[str, str] | None = None) -> None:
        self.jars = jars
        self._store_settings = {
            **THROW_AWAY,
            "max_connections": str(MAX_CONNECTIONS),
            "deadlock_timeout": "200ms",
            "wal_level": "replica",
            "max_wal_senders": "4",
            **(store_settings or {}),
        }
        self._resources = ExitStack()
        self._open = AsyncExitStack()
        self._clusters: dict[int, Cluster] = {}
        self._store: PostgresServer | None = None
        self.store_proxy = Proxy(free_ports(1)[0])

    async def __aenter__(self) -> Self:
        await self._open.enter_async_context(self.store_proxy)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()
        await asyncio.to_thread(self._resources.close)

    async def cluster(self, brokers: int) -> Cluster:
        if brokers not in self._clusters:
            self._clusters[brokers] = await self._open.enter_async_context(
                Cluster(self.jars, brokers=brokers)
            )
        await self._clusters[brokers].until_up()
        return self._clusters[brokers]

    async def store(self) -> PostgresServer:
        if self._store is None:
            embedded = EmbeddedPostgres(settings=self._store_settings, port=free_ports(1)[0])
            self._store = await asyncio.to_thread(
                lambda: PostgresServer(self._resources.enter_context(embedded))
            )
            self.store_proxy.target = embedded.port
        await asyncio.to_thread(self._store.embedded.start)
        return self._store


@dataclass(frozen=True)
class Stage:
    """What reads a topic: workers, or embedding stages.

    Attributes:
        topic: what they read.
        group: as what.
    """

    topic: str
    group: str

    @property
    def partitions(self) -> list[TopicPartition]:
        return [TopicPartition(self.topic, number) for number in range(PARTITIONS)]


@dataclass
class Stack:
    """One fault's surroundings.

    Attributes:
        dsn: how the workers reach the store: through the proxy, unless somebody says otherwise.
        replaceable: names of events that the input topic may forget.
        standby: a second server.
        texts: the topics of questions in words; None: there are no embedding stages.
        provider: of embeddings.
        embedder_program: what Python runs as an embedding stage.
        at_the_end: whatever is to be cleared away.
        members: the workers and the embedding stages that are to be alive.
        busy: those of them that a fault is at work on.
        rng: whatever is random about a fault comes from here.
    """

    cluster: Cluster
    store: PostgresServer
    store_proxy: Proxy
    database: Database
    channel: Channel
    output_reader: OutputReader
    load: Load
    folder: Path
    rng: random.Random
    dsn: str
    settings: Mapping[str, str] = field(default_factory=dict)
    program: Sequence[str] = ("-m", "streams", "worker")
    members: list[Worker] = field(default_factory=list)
    busy: set[int] = field(default_factory=set)
    replaceable: set[str] = field(default_factory=set)
    store_process: asyncio.Lock = field(default_factory=asyncio.Lock)
    broker_process: asyncio.Lock = field(default_factory=asyncio.Lock)
    standby: EmbeddedPostgres | None = None
    texts: Texts | None = None
    provider: Imitation | None = None
    embedder_program: Sequence[str] = ("-m", "streams", "embedder")
    at_the_end: ExitStack = field(default_factory=ExitStack)
    _started: list[Worker] = field(default_factory=list)
    _observers: tuple[AIOKafkaAdminClient, AIOKafkaConsumer] | None = None
    _embedders: list[Worker] = field(default_factory=list)
    _seen: dict[Stage, dict[int, int]] = field(default_factory=dict)

    @property
    def workers(self) -> Stage:
        return Stage(self.channel.input, self.channel.name)

    @property
    def stages(self) -> list[Stage]:
        """In the order in which an event passes through them."""
        if self.texts is None:
            return [self.workers]
        group = self.texts.settings["ANABRANCH_EMBEDDER_GROUP"]
        return [Stage(self.texts.input, group), self.workers]

    # Workers

    def start_worker(self, **settings: str) -> Worker:
        """One more member."""
        return self._start("worker", self.dsn, self.program, settings)

    def start_embedder(self, **settings: str) -> Worker:
        """One more embedding stage."""
        assert self.texts is not None
        assert self.provider is not None
        own = {
            **self.texts.settings,
            "ANABRANCH_EMBEDDING_PROVIDER": "openai",
            "ANABRANCH_EMBEDDING_MODEL": "some-model",
            "ANABRANCH_EMBEDDING_BASE_URL": f"{self.provider.url}/openai/v1",
            "ANABRANCH_EMBEDDING_API_KEY": self.provider.key,
        }
        embedder = self._start("embedder", None, self.embedder_program, own | settings)
        self._embedders.append(embedder)
        return embedder

    def _start(
        self, kind: str, dsn: str | None, program: Sequence[str], settings: Mapping[str, str]
    ) -> Worker:
        worker = Worker(
            self.folder / f"{kind}-{len(self._started)}.log",
            self.channel,
            dsn,
            {
                "KAFKA_BOOTSTRAP_SERVERS": self.cluster.workers_bootstrap,
                **_WORKER_SETTINGS,
                "FAULT_SWITCH": str(self.switch),
                **self.settings,
                **settings,
            },
            program,
        )
        self._started.append(worker)
        self.members.append(worker)
        return worker

    def is_embedder(self, worker: Worker) -> bool:
        return worker in self._embedders

    def replace(self, worker: Worker) -> Worker:
        """kill -9, and another one of its kind in its place."""
        worker.kill()
        self.members.remove(worker)
        return self.start_embedder() if self.is_embedder(worker) else self.start_worker()

    async def until_unready(self, *, seconds: float) -> None:
        """Waits until no member is ready: each of them knows that something is wrong."""
        await asyncio.gather(*(worker.until_ready(ready=False, seconds=seconds) for worker in self.members))

    async def until_assigned(self, *, seconds: float) -> None:
        """Waits until the members alone have every partition of every stage."""

        def partitions(worker: Worker) -> int:
            _, body = worker.page("/healthz/ready")
            return int(json.loads(body)["partitions"]) if body.startswith("{") else 0

        deadline = time.monotonic() + seconds
        while True:
            assigned = [await asyncio.to_thread(partitions, worker) for worker in self.members]
            if sum(assigned) == PARTITIONS * len(self.stages):
                return
            assert time.monotonic() < deadline, (
                f"after {seconds:.0f} s the members have {assigned} partitions"
            )
            await asyncio.sleep(_CHECK_INTERVAL_SECONDS)

    @asynccontextmanager
    async def one_of_the_workers(self, like: Worker | None = None) -> AsyncIterator[Worker]:
        """A member that nothing else is being done to.

        Args:
            like: of the same kind.
        """

        def idle() -> list[Worker]:
            return [
                worker
                for worker in self.members
                if worker.port not in self.busy
                and (like is None or self.is_embedder(worker) == self.is_embedder(like))
            ]

        while not idle():  # noqa: ASYNC110  # whoever is at work on one tells nobody
            await asyncio.sleep(0.1)
        worker = self.rng.choice(idle())
        self.busy.add(worker.port)
        try:
            yield worker
        finally:
            self.busy.discard(worker.port)

    def end_workers(self) -> None:
        for worker in self._started:
            worker.end()

    @property
    def switch(self) -> Path:
        """What `tests.faults.sabotage` looks at."""
        return self.folder / "switch"

    def latencies(self, *, since: float, partitions: Collection[int] = range(PARTITIONS)) -> list[float]:
        """The seconds from sending each event to its result's publication, or until now if it has none.

        Args:
            since: only events that were sent after this, seconds since the epoch.
            partitions: only events of these.
        """
        published = self.published()
        now = time.time()
        seconds = [
            published.get(name, now) - at
            for name, (partition, at) in self.load.sent.items()
            if partition in partitions and at >= since
        ]
        assert len(seconds) > 20, f"only {len(seconds)} events since"
        return seconds

    def published(self) -> dict[str, float]:
        """The events to the moment their result was published, seconds since the epoch."""
        published: dict[str, float] = {}
        for record in self.output_reader.results:
            published.setdefault(name_of(record), record.timestamp / 1000)
        return published

    @property
    def answered(self) -> set[str]:
        """The names of all events that have an answer."""
        came = [*self.output_reader.results, *self.dead_letters]
        return {name for record in came for name in names_of(record, self.load.places)}

    @property
    def dead_letters(self) -> list[Any]:
        """Of all stages."""
        return [*self.output_reader.dead_letters, *([] if self.texts is None else self.texts.dead_letters)]

    async def reported_lag(self) -> float:
        """The sum of what the workers report."""
        return sum([(await worker.scrape()).total("anabranch_consumer_lag") for worker in self.members])

    @property
    def logs(self) -> str:
        """The last words of each worker."""
        return "\n".join(
            f"--- {worker.log_file.name} ---\n{worker.log[-3000:]}" for worker in self._started[-4:]
        )

    # The group

    async def lag(self) -> int:
        """Events of all input topics that are not committed.

        Raises:
            KafkaError, TimeoutError: the broker does not tell.
        """
        total = 0
        for stage in self.stages:  # in order: what one hands on in between, the next one counts
            committed, ends = await self.committed(stage), await self.ends(stage)
            total += sum(end - committed.get(partition, 0) for partition, end in ends.items())
        return total

    async def committed(self, stage: Stage | None = None) -> dict[int, int]:
        """Partition to offset; of the workers by default.

        Raises:
            KafkaError, TimeoutError: the broker does not tell.
        """
        stage = stage or self.workers
        async with asyncio.timeout(_ANSWER_SECONDS):
            administrator, _ = await self._open_clients()
            # The consumer's own way to ask takes a coordinator that has moved, or is still reading, for one that
            # knows of no offsets.
            reported = await administrator.list_consumer_group_offsets(stage.group)
        found = {tp.partition: said.offset for tp, said in reported.items() if said.offset >= 0}
        if not found.keys() >= self._seen.get(stage, {}).keys():
            raise GroupLoadInProgressError("it has told more before")
        self._seen[stage] = found
        return found

    async def ends(self, stage: Stage | None = None) -> dict[int, int]:
        """Partition to the offset that the next event will have; of the workers by default.

        Raises:
            KafkaError, TimeoutError: the broker does not tell.
        """
        async with asyncio.timeout(_ANSWER_SECONDS):
            _, reader = await self._open_clients()
            ends = await reader.end_offsets((stage or self.workers).partitions)
        return {tp.partition: end for tp, end in ends.items()}

    def forget_input(self) -> None:
        """The input topic is another one: it need not have what was asked so far, nor anything be committed yet."""
        self.replaceable |= {*self.load.asked}
        self._seen.clear()

    @asynccontextmanager
    async def commits_only_advance(self) -> AsyncIterator[None]:
        """Sees that no committed offset goes back: nobody commits who is not the partition's owner."""
        highest: dict[tuple[str, int], int] = {}
        over = asyncio.Event()

        async def watch() -> None:
            while not over.is_set():
                for stage in self.stages:
                    found: dict[int, int] = {}
                    with suppress(KafkaError, TimeoutError):  # a broker that is away tells nothing
                        found = await self.committed(stage)
                    for partition, offset in found.items():
                        before = highest.setdefault((stage.topic, partition), offset)
                        assert offset >= before, (
                            f"committed offset of {stage.topic}[{partition}] went from {before} to {offset}"
                        )
                        highest[stage.topic, partition] = offset
                await asyncio.sleep(0.05)

        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            over.set()
            await watching

    async def _open_clients(self) -> tuple[AIOKafkaAdminClient, AIOKafkaConsumer]:
        if self._observers is None:
            servers = self.channel.bootstrap_servers
            administrator = AIOKafkaAdminClient(bootstrap_servers=servers)
            reader = AIOKafkaConsumer(bootstrap_servers=servers)
            for client in (administrator, reader):
                await client.start()
            self._observers = administrator, reader
        return self._observers

    # Recovery, and the end

    async def until_recovered(self, seconds: float) -> float:
        """Waits until every member is ready and the lag is no more than the load of a moment; returns how long."""
        began = time.monotonic()
        state = ""
        while time.monotonic() - began < seconds:
            ready = [await asyncio.to_thread(worker.is_ready) for worker in self.members]
            try:
                lag = await self.lag()
            except (KafkaError, TimeoutError) as error:
                state = f"the broker does not tell the lag ({type(error).__name__})"
                continue
            if all(ready) and lag <= self.load.per_second * _SECONDS_OF_LOAD:
                return time.monotonic() - began
            state = f"{sum(ready)} of {len(ready)} workers are ready, lag {lag}"
            await asyncio.sleep(_CHECK_INTERVAL_SECONDS)
        raise AssertionError(f"not well {seconds:.0f} s after it was mended: {state}")

    async def until_committed(self, seconds: float) -> None:
        """Waits until everything that the input topic holds now is committed; of each stage, one after another.

        Raises:
            AssertionError: it is not, in time.
        """
        for stage in self.stages:
            await self._until_committed(stage, seconds)

    async def _until_committed(self, stage: Stage, seconds: float) -> None:
        wanted = await self.ends(stage)
        deadline = time.monotonic() + seconds
        while True:
            committed: dict[int, int] = {}
            with suppress(KafkaError, TimeoutError):
                committed = await self.committed(stage)
            behind = {of: committed.get(of, 0) for of, end in wanted.items() if committed.get(of, 0) < end}
            if not behind:
                return
            assert time.monotonic() < deadline, (
                f"after {seconds:.0f} s commits stand still: {behind} of {wanted}"
            )
            await asyncio.sleep(_CHECK_INTERVAL_SECONDS)

    async def settle(self, seconds: float) -> Verdict:
        """Ends the load, waits until everything is answered and committed, and accounts for it.

        Raises:
            AssertionError: the lag does not return to zero.
        """
        await self.load.finish()
        deadline = time.monotonic() + seconds
        silent_since, seen, state = time.monotonic(), 0, ""
        while True:
            reader = self.output_reader
            came = len(reader.results) + len(self.dead_letters) + len(reader.replies)
            if came > seen:
                silent_since, seen = time.monotonic(), came
            missing = self.load.acknowledged - self.answered - self.replaceable
            lag, reported = -1, await self.reported_lag()
            with suppress(KafkaError, TimeoutError):
                lag = await self.lag()
            state = f"{len(missing)} events unanswered, lag {lag}, {reported:.0f} by the metric"
            silent = time.monotonic() - silent_since
            if lag == 0 and reported == 0 and silent > (_SILENCE_SECONDS if missing else 1.0):
                break
            assert time.monotonic() < deadline, f"{seconds:.0f} s after the load: {state}"
            await asyncio.sleep(_CHECK_INTERVAL_SECONDS)
        return await self.account()

    async def account_for_the_worst(self, seconds: float) -> Verdict:
        """Accounts after something has failed: whoever can still answer does."""
        with suppress(AssertionError, KafkaError, TimeoutError):
            return await self.settle(seconds)
        return await self.account()

    async def account(self) -> Verdict:
        log = [
            Logged(name_of(record), record.partition, record.offset)
            for record in await self._input()
            if record.headers
        ]
        return account(
            self.load.asked.values(),
            log,
            [
                answer_of(record, name, is_result=is_result)
                for records, is_result in (
                    (self.output_reader.results, True),
                    (self.dead_letters, False),
                )
                for record in records
                for name in names_of(record, self.load.places)
            ],
            acknowledged=self.load.acknowledged,
            replaceable=self.replaceable,
            replies=[reply_name_of(record) for record in self.output_reader.replies],
        )

    async def _input(self) -> list[Any]:
        """Everything that the first stage's input topic holds and that was not taken back, without the values."""
        reader = AIOKafkaConsumer(
            bootstrap_servers=self.channel.bootstrap_servers,
            isolation_level="read_committed",
            max_partition_fetch_bytes=16 * 1024 * 1024,
        )
        await reader.start()
        try:
            partitions = self.stages[0].partitions
            reader.assign(partitions)
            await reader.seek_to_beginning()
            ends = await reader.end_offsets(partitions)
            records = []
            while any([await reader.position(tp) < end for tp, end in ends.items()]):
                for batch in (await reader.getmany(timeout_ms=200)).values():
                    records += [replace(record, value=None) for record in batch]
            return records
        finally:
            await reader.stop()

    async def gaps(self) -> int:
        """How often an offset of the input topic is not followed by the next one."""
        offsets = sorted((record.partition, record.offset) for record in await self._input())
        return sum(here[0] == there[0] and there[1] - here[1] > 1 for here, there in pairwise(offsets))

    async def configure_topic(self, topic: str, config: Mapping[str, str]) -> None:
        """Changes a topic of this stack; what is not named is the broker's default."""
        client = AIOKafkaAdminClient(bootstrap_servers=self.channel.bootstrap_servers)
        await client.start()
        try:
            resource = ConfigResource(
                ConfigResourceType.TOPIC, topic, configs={"max.message.bytes": str(_MAX_BYTES), **config}
            )
            [response] = await client.alter_configs([resource])
            assert [error for error, *_ in response.resources] == [0], response
        finally:
            await client.close()

    # The store

    async def execute(self, statement: str, *values: object) -> None:
        """As the superuser, past the proxy."""
        connection = await asyncpg.connect(self.database.admin)
        try:
            await connection.execute(statement, *values)
        finally:
            await connection.close()

    def repair(self) -> None:
        """Nothing stands between the workers and their servers."""
        for proxy in (self.store_proxy, *self.cluster.proxies):
            proxy.repair()

    async def close(self) -> None:
        if self._observers is not None:
            administrator, reader = self._observers
            await administrator.close()
            await reader.stop()


@asynccontextmanager
async def open_stack(
    servers: Servers,
    *,
    brokers: int,
    rng: random.Random,
    per_second: float,
    events: Callable[[], Iterator[Event]] = good_events,
    settings: Mapping[str, str] | None = None,
    program: Sequence[str] = ("-m", "streams", "worker"),
    cluster: Cluster | None = None,
    texts: bool = False,
) -> AsyncIterator[Stack]:
    """Topics, a group and a database of their own; no worker yet, and no load.

    Args:
        texts: the events are questions in words, for embedding stages.
    """
    store = await servers.store()
    cluster = cluster or await servers.cluster(brokers)
    database = await asyncio.to_thread(store.database)
    async with AsyncExitStack() as open_now:
        folder = Path(open_now.enter_context(TemporaryDirectory(prefix="anabranch-faults-")))
        await load_corpus(database.writer, tiny_corpus())
        kafka = cluster.kafka
        channel = await open_now.enter_async_context(
            open_channel(kafka.bootstrap_servers, f"f{uuid4().hex[:8]}", copies=kafka.copies)
        )
        output_reader = await open_now.enter_async_context(OutputReader(channel))
        questions, provider = None, None
        if texts:
            questions = await open_now.enter_async_context(open_texts(channel))
            provider = await open_now.enter_async_context(imitation())
            provider.dimensions, provider.delay_seconds = 768, _EMBEDDING_SECONDS
        topic = channel.input if questions is None else questions.input
        load = Load(kafka.bootstrap_servers, topic, events(), replies=channel.replies, per_second=per_second)
        await load.producer.start()
        open_now.push_async_callback(load.close)
        stack = Stack(
            cluster=cluster,
            store=store,
            store_proxy=servers.store_proxy,
            database=database,
            channel=channel,
            output_reader=output_reader,
            load=load,
            folder=folder,
            rng=rng,
            settings=settings or {},
            program=program,
            texts=questions,
            provider=provider,
            dsn=database.worker.replace(f":{store.embedded.port}/", f":{servers.store_proxy.port}/"),
        )
        open_now.callback(stack.at_the_end.close)
        open_now.callback(stack.repair)
        open_now.push_async_callback(stack.close)
        open_now.callback(stack.end_workers)
        yield stack
    await asyncio.to_thread(store.embedded.start)
    await asyncio.to_thread(store.drop, database)
