"""`anabranch stats`: statistics of the store, with output for people or machines."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import asyncpg
from rich import filesize
from rich.table import Table

from streams.store import statistics
from streams.store.statistics import Statistics
from streams.terminal import Console, Text, json_text

__all__ = ["as_json", "read", "show"]

_CONNECT_SECONDS = 10.0
_BAR_WIDTH = 16
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_KEYS_SHOWN = 8
_STATES = {"valid": "green", "invalid": "bold red", "missing": "red"}


async def read(dsn: str) -> Statistics:
    """Collect the statistics of the store in the owner's connection string.

    Raises:
        StatisticsError: the statistics cannot be collected.
        asyncpg.PostgresError: the server reports an error; other exceptions if it cannot be reached.
    """
    connection = await asyncpg.connect(
        dsn, timeout=_CONNECT_SECONDS, server_settings={"application_name": "anabranch stats"}
    )
    try:
        return await statistics.collect(connection)
    finally:
        await connection.close(timeout=_CONNECT_SECONDS)


def as_json(found: Statistics) -> str:
    """The statistics as one JSON object; its keys are the field names in `streams.store.statistics`."""
    return json_text(asdict(found), indent=2)


def show(found: Statistics, console: Console | None = None) -> None:
    """Print the statistics as tables."""
    console = console or Console()
    server = found.server
    console.print(
        Text.assemble(
            (server.database, "bold"), f"  PostgreSQL {server.postgresql} · pgvector {server.pgvector}"
        )
    )
    for section in (_chunks, _access, _completeness, _groups, _tables, _indexes):
        console.print()
        console.print(section(found))
    console.print()
    console.print(_derived(found))


def _chunks(found: Statistics) -> Table:
    chunks, vectors = found.chunks, found.embeddings
    table = _plain("Chunks")
    table.add_row("chunks", _number(chunks.total))
    table.add_row("embedded", _number(chunks.embedded), _share(chunks.embedded_share))
    declared = "any" if vectors.dimensions is None else str(vectors.dimensions)
    table.add_row("dimensions", declared, _mixed(vectors))
    table.add_row("stored", vectors.storage, _out_of_line(vectors))
    table.add_row("zero vectors", _fault(vectors.zero), _when(vectors.zero, "never returned"))
    table.add_row(
        "extreme vectors", _fault(vectors.extreme), _when(vectors.extreme, "their similarity is wrong")
    )
    missing = chunks.parent_missing
    table.add_row("with a parent", _number(chunks.with_parent))
    table.add_row(
        "parent missing", _fault(missing), _when(missing, "returned without a parent, with a warning")
    )
    return table


def _access(found: Statistics) -> Table:
    access = found.access
    table = _plain("Access")
    no_reader_note = Text("")
    if access.documents_unreadable:
        no_reader_note = Text.assemble(
            _percent(access.documents_unreadable_share), " of all documents, with "
        )
        no_reader_note.append(_count(access.chunks_unreadable, "chunk"))
    table.add_row("unreadable documents", _fault(access.documents_unreadable), no_reader_note)
    table.add_row("public documents", _number(access.documents_public))
    largest = f"the largest has {_count(access.access_set_max, 'principal')}" if access.access_sets else ""
    table.add_row("sets of readers", _number(access.access_sets), Text(largest, "dim"))
    table.add_row("grants", _number(access.grants))
    for kind in access.kinds:
        whom = _count(kind.documents, "document")
        if kind.kind == "public":
            name = "public"
        else:
            name = "without a prefix" if kind.kind is None else f"{kind.kind}:…"
            whom = f"{_count(kind.principals, 'principal')}, {whom}"
        table.add_row(Text(f"  {name}"), _number(kind.grants), Text(whom, "dim"))
    return table


def _derived(found: Statistics) -> Text:
    if found.differences is None:
        return Text("derived data: not verified; this requires the tables' owner", "yellow")
    if not found.differences:
        return Text("derived data: verified", "green")
    first = found.differences[0]
    return Text(
        f"derived data: {first.table} is wrong for {first.id}: revoked grants may stay in force; run"
        " `anabranch migrate`",
        "bold red",
    )


def _completeness(found: Statistics) -> Table:
    table = _headed("Completeness", ("table", "field", ">rows", "", "malformed"))
    seen = ""
    for name, field, rows, share, malformed in _fields_and_keys(found):
        table.add_row(
            Text(name if name != seen else "", "dim"),
            field,
            _number(rows),
            _share(share),
            Text(f"{malformed:,}", "red") if malformed else "",
        )
        seen = name
    return table


def _fields_and_keys(found: Statistics) -> Iterator[tuple[str, Text, int, float | None, int]]:
    for keys in found.metadata_keys:
        for field in found.fields:
            if field.table == keys.table:
                yield field.table, Text(field.name), field.present, field.share, field.malformed
        for key in keys.most_common[:_KEYS_SHOWN]:
            yield keys.table, Text(f"  {key.key}", "cyan"), key.rows, key.share, 0
        rest = keys.distinct - min(len(keys.most_common), _KEYS_SHOWN)
        if rest:
            yield keys.table, Text(f"  and {rest:,} less common keys", "dim"), 0, None, 0


def _groups(found: Statistics) -> Table:
    sessions, topics = found.sessions, found.topics
    table = _headed("Sessions and topics", ("", ">number", ">documents", ">chunks", ""))
    table.add_row("sessions", _number(sessions.total))
    for session in sessions.largest:
        table.add_row(
            Text(f"  {session.session_id}", "dim"), "", _number(session.documents), _number(session.chunks)
        )
    table.add_row(
        "without a session", "", _number(sessions.documents_without), _number(sessions.chunks_without)
    )
    table.add_row("topics", _number(topics.total), "", _number(topics.chunks_with))
    for topic in topics.largest:
        table.add_row(Text(f"  {topic.topic_id}", "dim"), "", "", _number(topic.chunks))
    return table


def _tables(found: Statistics) -> Table:
    table = _headed("Tables", ("", ">rows", ">in rows", ">out of line", ">indexes", ">total"))
    for entry in found.tables:
        sizes = (entry.heap_bytes, entry.toast_bytes, entry.index_bytes, entry.total_bytes)
        table.add_row(entry.name, _number(entry.rows), *map(_bytes, sizes))
    return table


def _indexes(found: Statistics) -> Table:
    table = _headed("Indexes", ("", "name", ">size", "on"))
    # On a narrow terminal, wrap the definitions, not the names.
    table.columns[1].no_wrap = True
    for index in found.indexes:
        table.add_row(
            Text(index.state, _STATES[index.state]),
            index.name,
            _bytes(index.bytes) if index.bytes else "",
            Text(index.definition, "dim"),
        )
    return table


# Parts


def _plain(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None)
    table.add_column(min_width=23)
    table.add_column(justify="right", min_width=9)
    table.add_column()
    return table


def _headed(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None)
    for heading in headings:
        table.add_column(
            heading.removeprefix(">"),
            justify="right" if heading.startswith(">") else "left",
            overflow="fold",
        )
    return table


def _number(value: int) -> Text:
    return Text(f"{value:,}", "" if value else "dim")


def _count(value: int, noun: str) -> str:
    return f"{value:,} {noun}" if value == 1 else f"{value:,} {noun}s"


def _fault(value: int) -> Text:
    """A number that should be zero."""
    return Text(f"{value:,}", "red" if value else "green")


def _when(value: int, meaning: str) -> Text:
    return Text(meaning if value else "", "dim")


def _percent(share: float | None) -> str:
    if share is None:
        return "–"
    # Rounding must not hide a single row without a value, or a single row with one.
    shown = f"{100 * share:.1f}"
    if shown == "100.0" and share < 1:
        return "> 99.9 %"
    if shown == "0.0" and share > 0:
        return "< 0.1 %"
    return f"{shown} %"


def _share(share: float | None) -> Text:
    if share is None:
        return Text("")
    full, part = divmod(round(share * _BAR_WIDTH * 8), 8)
    bar = "█" * full + (_EIGHTHS[part] if part else "")
    return Text.assemble(
        (f"{bar:<{_BAR_WIDTH}}", "green" if share == 1 else "yellow"), f" {_percent(share):>8}"
    )


def _bytes(value: int) -> Text:
    return Text(filesize.decimal(value), "" if value else "dim")


def _mixed(vectors: statistics.Embeddings) -> Text:
    if vectors.dimensions_min == vectors.dimensions_max:
        return Text("")
    return Text(f"stored: {vectors.dimensions_min} to {vectors.dimensions_max}", "red")


def _out_of_line(vectors: statistics.Embeddings) -> Text:
    if vectors.out_of_line is None:
        return Text("older rows may be stored out of line: this server cannot report it", "dim")
    if vectors.out_of_line:
        return Text(f"{_count(vectors.out_of_line, 'vector')} stored out of line", "yellow")
    return Text("all vectors are stored in their rows", "dim")
