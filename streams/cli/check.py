"""`anabranch check`: checks the store and the topics, with output for people or machines."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeAlias

import asyncpg
from aiokafka.errors import KafkaError

import streams
from streams.broker.cluster import describe_cluster
from streams.broker.compression import CODECS, MISSING_CODECS, MISSING_CODECS_REMEDY, missing_codecs
from streams.broker.diagnosis import diagnose
from streams.broker.topics import DEAD_LETTER_MARGIN_BYTES, check_topics
from streams.configured import broker_connection, load_profiles, open_codec, required_topics, result_contract
from streams.network_errors import connection_problem
from streams.settings import Settings
from streams.store.catalog import Connection
from streams.store.connect_errors import explain
from streams.store.facts import StoreFacts, store_facts
from streams.store.findings import Finding, Level
from streams.store.preflight import inspect
from streams.store.replication import lag_seconds
from streams.store.verification import NotVerified, verify
from streams.terminal import Console, Text, json_text

__all__ = ["CheckReport", "as_json", "examine", "show"]

# The most severe first.
_STYLES: Final = {"refused": "bold red", "unready": "red", "warning": "yellow"}
_CONNECT_SECONDS = 10.0
_CORRECT_DSN = "correct DATABASE_CONNECTION_STRING"
_STORE_ERRORS = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError)
# The smallest event has about 4 KB; whatever the topic's limit is, dead letters need more room than that.
_SMALLEST_TOPIC_BYTES = 16 * 1024
_NO_REPLIES = "; results for callers that want a reply there go to the output topic"


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What was found.

    Attributes:
        findings: of every check, at least one.
        facts: name and value; what could be learned about the servers.
    """

    findings: Sequence[Finding]
    facts: Sequence[tuple[str, str]]

    @property
    def can_run(self) -> bool:
        """Whether a worker can run."""
        return not any(finding.level in {"refused", "unready"} for finding in self.findings)


_Examined: TypeAlias = tuple[list[Finding], list[tuple[str, str]]]


async def examine(settings: Settings, stage: Settings | None = None) -> CheckReport:
    """Run all checks that a worker runs at start, and more.

    Args:
        settings: the worker's.
        stage: the embedding stage's, to check its topics too.

    Raises:
        SettingsError: a setting that a worker requires is missing or unusable.
    """
    open_codec(settings)
    result_contract(settings)
    load_profiles(settings)
    store, about_store = await _store(settings)
    derived = await _derived(settings)
    topics, about_kafka = await _topics(settings, stage)
    return CheckReport(
        [*_codecs(), *store, *derived, *topics],
        [("Anabranch", streams.__version__), *about_store, *about_kafka],
    )


def as_json(report: CheckReport) -> str:
    """The findings as a JSON array; its objects have the fields of a `Finding`."""
    return json_text([finding.__dict__ for finding in report.findings])


def show(report: CheckReport, console: Console | None = None) -> None:
    """Print faults and warnings with their remedies, then the facts, then the verdict."""
    console = console or Console()
    for line in _lines(report):
        console.print(line, soft_wrap=True)  # a remedy stays on one line, and can be copied


def _lines(report: CheckReport) -> Iterator[Text]:
    levels = list(_STYLES)
    faults = [finding for finding in report.findings if finding.level != "ok"]
    for finding in sorted(faults, key=lambda finding: levels.index(finding.level)):
        style = _STYLES[finding.level]
        yield Text.assemble((f"{finding.level:<8}", style), f" {finding.check}: {finding.detail}")
        if finding.remedy:  # none where the fault says what to write
            yield Text(f"{'':8} remedy: {finding.remedy}")
    if faults:
        yield Text()
    failed = {finding.check for finding in faults}
    passed = dict.fromkeys(finding.check for finding in report.findings if finding.check not in failed)
    for name, value in [*report.facts, ("passed", ", ".join(passed))]:
        yield Text.assemble((f"{name:<11}", "dim"), f" {value}")
    yield Text()
    yield _verdict(report)


def _verdict(report: CheckReport) -> Text:
    counts = Counter(finding.level for finding in report.findings)
    numbers = {"fault": counts["refused"] + counts["unready"], "warning": counts["warning"]}
    listed = [f"{number} {name}{'' if number == 1 else 's'}" for name, number in numbers.items() if number]
    if counts["refused"]:
        what, style = "a worker refuses to run here", "bold red"
    elif counts["unready"]:
        what, style = "a worker is not ready here until this is fixed", "red"
    else:
        what, style = "a worker can run here", "green"
    return Text(": ".join([what, *([", ".join(listed)] if listed else [])]), style)


def _codecs() -> list[Finding]:
    missing = missing_codecs()
    if not missing:
        return [Finding("codecs", "ok", f"{', '.join(CODECS.values())} can be read")]
    return [Finding("codecs", "refused", f"{MISSING_CODECS} {', '.join(missing)}", MISSING_CODECS_REMEDY)]


async def _store(settings: Settings) -> _Examined:
    try:
        connection = await asyncpg.connect(
            settings.store_dsn,
            timeout=_CONNECT_SECONDS,
            statement_cache_size=settings.anabranch_statement_cache_size,
        )
    except Exception as error:
        if (refused := explain(error)) is not None:
            detail, _, remedy = str(refused).partition("; ")
            level: Level = "refused" if refused.before_connect else "unready"
            return [Finding("connection", level, detail, remedy or _CORRECT_DSN)], []
        if not isinstance(error, _STORE_ERRORS):
            raise
        detail = f"cannot connect to PostgreSQL as the worker ({connection_problem(error)})"
        remedy = "check DATABASE_CONNECTION_STRING, that the server is running, and the server's log"
        return [Finding("connection", "unready", detail, remedy)], []
    try:
        findings = await inspect(
            connection,
            principals_setting=settings.anabranch_principals_setting,
            dimensions=settings.anabranch_embedding_dimensions,
        )
        replica = _replica(await lag_seconds(connection), settings)
        facts = _about_store(await store_facts(connection))
    finally:
        await connection.close()
    return [*findings, *replica], [*facts, *(("replica", finding.detail) for finding in replica)]


def _about_store(facts: StoreFacts) -> list[tuple[str, str]]:
    schema = "unknown" if facts.schema is None else facts.schema or "none"
    return [
        (
            "PostgreSQL",
            f"{facts.postgresql}, pgvector {facts.pgvector or 'missing'}, schema version {schema}",
        ),
        ("database", f"{facts.database} at {facts.address or 'a Unix socket'}, role {facts.role}"),
    ]


def _replica(lag: float, settings: Settings) -> list[Finding]:
    """Whether a replica may be searched; nothing about a primary."""
    if lag == 0:
        return []
    limit = settings.anabranch_max_replication_lag_seconds
    behind = "an unknown time" if math.isinf(lag) else f"{lag:.0f} s"
    detail = f"the server is a replica, and may be {behind} behind its primary; the limit is {limit:g} s"
    if lag <= limit:
        return [Finding("replica", "ok", detail)]
    remedy = "check replication; if the primary is idle, grant pg_read_all_stats to the worker's role"
    return [Finding("replica", "unready", detail, remedy)]


async def _derived(settings: Settings) -> list[Finding]:
    """Verify derived data, which requires the owner: only the owner sees all rows."""
    if settings.database_admin_connection_string is None:
        remedy = "set DATABASE_ADMIN_CONNECTION_STRING to the tables' owner for this command, or run `anabranch stats`"
        return [
            Finding(
                "derived", "warning", "derived data was not verified: only its owner sees all rows", remedy
            )
        ]
    try:
        connection = await asyncpg.connect(settings.admin_dsn, timeout=_CONNECT_SECONDS)
    except Exception as error:
        if (refused := explain(error, "DATABASE_ADMIN_CONNECTION_STRING")) is not None:
            detail, _, remedy = str(refused).partition("; ")
            return [
                Finding("derived", "unready", detail, remedy or "correct DATABASE_ADMIN_CONNECTION_STRING")
            ]
        if not isinstance(error, _STORE_ERRORS):
            raise
        detail = f"cannot connect to PostgreSQL as the owner ({connection_problem(error)})"
        return [Finding("derived", "unready", detail, "check DATABASE_ADMIN_CONNECTION_STRING")]
    try:
        return await _verified(connection)
    finally:
        await connection.close()


async def _verified(connection: Connection) -> list[Finding]:
    try:
        found = await verify(connection)
    except NotVerified as error:
        return [Finding("derived", "unready", str(error), "run anabranch migrate, or use another role")]
    except _STORE_ERRORS as error:
        return [
            Finding(
                "derived",
                "unready",
                f"derived data was not verified: PostgreSQL ended the comparison ({type(error).__name__})",
                "check again; it reads every row, so the owner's statement_timeout has to allow for that",
            )
        ]
    if not found:
        return [Finding("derived", "ok", "derived data matches the grants, topics and metadata")]
    return [
        Finding(
            "derived",
            "refused",
            f"{difference.table}: the derived data of {difference.id} is wrong; revoked grants may stay in force",
            "anabranch migrate",
        )
        for difference in found
    ]


async def _topics(settings: Settings, stage: Settings | None) -> _Examined:
    # Only the sizes count here; the numbers of partitions and replicas are the operator's choice.
    specs = required_topics(
        settings,
        stage,
        partitions=1,
        replication_factor=1,
        max_event_bytes=_SMALLEST_TOPIC_BYTES,
    )
    connection = broker_connection(settings)
    try:
        found = await check_topics(connection.client_options(), specs)
    except (KafkaError, OSError) as error:
        diagnosis = await diagnose(connection)
        if diagnosis is not None:
            detail = f"{diagnosis.server}: {diagnosis.detail}"
            level: Level = "refused" if diagnosis.refused else "unready"
            return [Finding("broker", level, detail, diagnosis.remedy)], []
        detail = f"Kafka does not answer correctly ({type(error).__name__})"
        remedy = "check KAFKA_BOOTSTRAP_SERVERS, and that the broker is running"
        return [Finding("broker", "unready", detail, remedy)], []
    findings = [
        Finding(
            "topic",
            "ok" if topic.ok else "warning" if topic.optional else "unready",
            f"{topic.topic} {topic.detail}{_NO_REPLIES if topic.optional and not topic.ok else ''}",
            topic.remedy,
        )
        for topic in found
    ]
    # A broker may be too old for a worker and still answer this.
    diagnosis = await diagnose(connection)
    if diagnosis is not None and diagnosis.refused:
        detail = f"{diagnosis.server}: {diagnosis.detail}"
        findings.append(Finding("broker", "refused", detail, diagnosis.remedy))
    sizes = {topic.topic: topic.max_message_bytes for topic in found}
    for each in (settings, *([] if stage is None else [stage])):
        taken, room = sizes[each.anabranch_input_topic], sizes[each.anabranch_dead_letter_topic]
        if taken is not None and room is not None and room < taken + DEAD_LETTER_MARGIN_BYTES:
            findings.append(
                Finding(
                    "topic",
                    "unready",
                    f"{each.anabranch_dead_letter_topic} accepts {room} bytes: too small for the largest event",
                    f"set its max.message.bytes to {taken + DEAD_LETTER_MARGIN_BYTES} or more",
                )
            )
    facts = [("topic", f"{topic.topic} {topic.detail}") for topic in found]
    with suppress(KafkaError):  # without this fact, nothing is wrong
        cluster = await describe_cluster(connection.client_options())
        protocol = cluster.protocol or "before 2.1"
        facts.insert(0, ("Kafka", f"protocol of Kafka {protocol}, at {', '.join(cluster.brokers)}"))
    return findings, facts
