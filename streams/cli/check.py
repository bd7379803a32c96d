"""`anabranch check`: checks the store and the topics, with output for people or machines."""

import math
from collections.abc import Sequence

import asyncpg
from aiokafka.errors import KafkaError
from rich.table import Table

from streams.broker.compression import CODECS, MISSING_CODECS, MISSING_CODECS_REMEDY, missing_codecs
from streams.broker.diagnosis import diagnose
from streams.broker.topics import DEAD_LETTER_MARGIN_BYTES, check_topics, topic_specs
from streams.configured import broker_connection, load_profiles, open_codec
from streams.settings import Settings
from streams.store.catalog import Connection
from streams.store.connect_errors import explain
from streams.store.findings import Finding
from streams.store.preflight import inspect
from streams.store.replication import lag_seconds
from streams.store.verification import NotVerified, verify
from streams.terminal import Console, Text

__all__ = ["examine", "table"]

_STYLES = {"ok": "green", "warning": "yellow", "unready": "red", "refused": "bold red"}
_CONNECT_SECONDS = 10.0
_STORE_ERRORS = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError)
# The smallest event has about 4 KB; whatever the topic's limit is, dead letters need more room than that.
_SMALLEST_TOPIC_BYTES = 16 * 1024


async def examine(settings: Settings) -> list[Finding]:
    """Run all checks that a worker runs at start, and more.

    Raises:
        SettingsError: a setting that a worker requires is missing or unusable.
    """
    open_codec(settings)
    load_profiles(settings)
    return [
        *_codecs(),
        *await _store(settings),
        *await _derived(settings),
        *await _topics(settings),
    ]


def table(findings: Sequence[Finding]) -> None:
    """Print the findings, with remedies for problems."""
    shown = Table(box=None, pad_edge=False)
    for heading in ("", "what", "found", "remedy"):
        shown.add_column(heading, overflow="fold")
    for finding in findings:
        style = _STYLES[finding.level]
        shown.add_row(Text(finding.level, style), finding.check, finding.detail, finding.remedy)
    Console().print(shown)


def _codecs() -> list[Finding]:
    missing = missing_codecs()
    if not missing:
        return [Finding("codecs", "ok", f"{', '.join(CODECS.values())} can be read")]
    return [Finding("codecs", "refused", f"{MISSING_CODECS} {', '.join(missing)}", MISSING_CODECS_REMEDY)]


async def _store(settings: Settings) -> list[Finding]:
    try:
        connection = await asyncpg.connect(
            settings.store_dsn,
            timeout=_CONNECT_SECONDS,
            statement_cache_size=settings.anabranch_statement_cache_size,
        )
    except Exception as error:
        if (refused := explain(error)) is not None:
            detail, _, remedy = str(refused).partition("; ")
            return [Finding("connection", "refused" if refused.before_connect else "unready", detail, remedy)]
        if not isinstance(error, _STORE_ERRORS):
            raise
        return [
            Finding(
                "connection",
                "unready",
                f"cannot connect to PostgreSQL as the worker ({type(error).__name__})",
                "check DATABASE_CONNECTION_STRING, that the server is running, and the server's log",
            )
        ]
    try:
        findings = await inspect(connection, principals_setting=settings.anabranch_principals_setting)
        return [*findings, *_replica(await lag_seconds(connection), settings)]
    finally:
        await connection.close()


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
            return [Finding("derived", "unready", detail, remedy)]
        if not isinstance(error, _STORE_ERRORS):
            raise
        detail = f"cannot connect to PostgreSQL as the owner ({type(error).__name__})"
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


async def _topics(settings: Settings) -> list[Finding]:
    specs = topic_specs(
        input_topic=settings.anabranch_input_topic,
        output_topic=settings.anabranch_output_topic,
        dead_letter_topic=settings.anabranch_dead_letter_topic,
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
            return [
                Finding("broker", "refused" if diagnosis.refused else "unready", detail, diagnosis.remedy)
            ]
        return [
            Finding(
                "broker",
                "unready",
                f"Kafka does not answer correctly ({type(error).__name__})",
                "check KAFKA_BOOTSTRAP_SERVERS, and that the broker is running",
            )
        ]
    findings = [
        Finding("topic", "ok" if topic.ok else "unready", f"{topic.topic} {topic.detail}", topic.remedy)
        for topic in found
    ]
    # A broker may be too old for a worker and still answer this.
    diagnosis = await diagnose(connection)
    if diagnosis is not None and diagnosis.refused:
        detail = f"{diagnosis.server}: {diagnosis.detail}"
        findings.append(Finding("broker", "refused", detail, diagnosis.remedy))
    sizes = {topic.topic: topic.max_message_bytes for topic in found}
    taken, room = sizes[settings.anabranch_input_topic], sizes[settings.anabranch_dead_letter_topic]
    if taken is not None and room is not None and room < taken + DEAD_LETTER_MARGIN_BYTES:
        findings.append(
            Finding(
                "topic",
                "unready",
                f"{settings.anabranch_dead_letter_topic} accepts {room} bytes: too small for the largest event",
                f"set its max.message.bytes to {taken + DEAD_LETTER_MARGIN_BYTES} or more",
            )
        )
    return findings
