"""`anabranch tail`: shows results or dead letters as they arrive, readable for people or as JSON."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias
from uuid import UUID

from aiokafka import ConsumerRecord
from rich.table import Table

from streams.broker.clients import running_consumer
from streams.broker.records import Unreadable
from streams.broker.topics import partitions_of
from streams.core.errors import TerminalError
from streams.core.messages import QueryEmbedding, QueryText
from streams.replay.dead_letters import instant_of
from streams.replay.journal import is_entry
from streams.settings import Settings
from streams.terminal import Console, Text, echo, json_text, printable
from streams.wire import Codec, result_to_json
from streams.wire.deadletter import MESSAGE_HEADER, NotADeadLetter, read_dead_letter

__all__ = ["Shown", "TailFilter", "print_json", "print_readable", "tail_topic"]

_Decode: TypeAlias = Callable[[bytes], QueryEmbedding | QueryText]


@dataclass(frozen=True, slots=True)
class Shown:
    """A record to show.

    Attributes:
        at: its timestamp.
        content: as JSON types.
        event_id: of the event, if known; likewise the others.
    """

    at: datetime
    content: Mapping[str, Any]
    event_id: UUID | None = None
    session_id: UUID | None = None
    profile: str | None = None


@dataclass(frozen=True, slots=True)
class TailFilter:
    """Selects records. An empty attribute selects all; a record must be selected by every attribute.

    Attributes:
        events: ids of events; a record that cannot be decoded is selected by its key.
        sessions: ids of sessions.
        profiles: names of profiles.
    """

    events: frozenset[UUID] = frozenset()
    sessions: frozenset[UUID] = frozenset()
    profiles: frozenset[str] = frozenset()

    def matches(self, shown: Shown, key: bytes | None) -> bool:
        """Whether a record with this key is selected."""
        event_id = shown.event_id or _uuid(key)
        return (
            (not self.events or event_id in self.events)
            and (not self.sessions or shown.session_id in self.sessions)
            and (not self.profiles or shown.profile in self.profiles)
        )


async def tail_topic(
    settings: Settings,
    options: dict[str, Any],
    *,
    dead_letters: bool,
    texts: bool = False,
    from_beginning: bool,
    limit: int | None,
    show: Callable[[Shown], object],
    selected: TailFilter = TailFilter(),
    notify: Callable[[str], object] = lambda _: None,
) -> None:
    """Show records until the limit, or indefinitely.

    Args:
        settings: for the topics, and the profile of events that do not name one.
        options: for the client.
        dead_letters: show dead letters instead of results.
        texts: the dead letters are the embedding stage's.
        from_beginning: start with the oldest record instead of the next one.
        limit: the number of records; None: indefinitely.
        show: called with each record that is selected.
        selected: which records to show.
        notify: called once with a line for people, as soon as the command waits for records.

    Raises:
        MissingTopics: the topic does not exist.
        KafkaError: the broker is unreachable or rejects the request.
    """
    topic = settings.anabranch_dead_letter_topic if dead_letters else settings.anabranch_output_topic
    await partitions_of(options, [topic])
    codec = Codec(dimensions=None)  # a dead letter may have others than the deployment's
    decode = codec.decode_text if texts else codec.decode_query
    start = "earliest" if from_beginning else "latest"
    async with running_consumer(options, topic, auto_offset_reset=start) as consumer:
        kind = "dead letters" if dead_letters else "results"
        notify(
            f"showing {kind} from the beginning; Ctrl-C ends"
            if from_beginning
            else f"waiting for new {kind}; --from-beginning shows older ones; Ctrl-C ends"
        )
        count = 0
        async for record in consumer:
            if dead_letters and is_entry(record.headers):
                continue  # an entry of `anabranch replay`, not a dead letter
            if isinstance(record.value, Unreadable):
                shown = _unreadable(record)
            elif dead_letters:
                shown = _dead_letter(decode, record, default_profile=settings.anabranch_default_profile)
            else:
                shown = _result(codec, record)
            if not selected.matches(shown, record.key):
                continue
            show(shown)
            count += 1
            if count == limit:
                return


def _unreadable(record: ConsumerRecord) -> Shown:
    content = {
        "unreadable": record.value.error.code,
        "partition": record.partition,
        "offset": record.value.first,
        "last_offset": record.value.last,
    }
    return Shown(instant_of(record.timestamp), content)


def _result(codec: Codec, record: ConsumerRecord) -> Shown:
    at = instant_of(record.timestamp)
    try:
        result = codec.decode_result(record.value or b"")
    except TerminalError as error:
        return Shown(at, {"undecodable": error.code, "partition": record.partition, "offset": record.offset})
    return Shown(at, result_to_json(result), result.event_id, result.session_id, result.profile)


def _dead_letter(decode: _Decode, record: ConsumerRecord, *, default_profile: str) -> Shown:
    """Which event it is, and why it was dead-lettered. The rest of the event's content is confidential."""
    at = instant_of(record.timestamp)
    event_id = session_id = profile = None
    try:
        event = decode(record.value or b"")
        event_id, session_id = event.event_id, event.session_id
        profile = default_profile if event.profile is None else event.profile
    except TerminalError as error:
        event_id = error.event_id
    content = {
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": f"{at:%Y-%m-%dT%H:%M:%S.%fZ}",
        "key": None if record.key is None else _key(record.key),
        "event_id": None if event_id is None else str(event_id),
        "headers": {name: (value or b"").decode(errors="replace") for name, value in record.headers},
    }
    return Shown(at, content, event_id, session_id, profile)


def _key(key: bytes) -> str:
    """As text if a terminal can show it, else in hexadecimal."""
    with suppress(UnicodeDecodeError):
        text = key.decode()
        if printable(text) == text:
            return text
    return f"0x{key.hex()}"


def _uuid(key: bytes | None) -> UUID | None:
    with suppress(ValueError):
        return UUID((key or b"").decode())
    return None


# Output


def print_json(shown: Shown) -> None:
    """Print a record as one line of JSON."""
    echo(json_text(shown.content))


def print_readable(shown: Shown, console: Console | None = None) -> None:
    """Print a record for people."""
    console = console or Console()
    content = shown.content
    if "results" in content:
        lines = _result_lines(shown)
    elif "headers" in content:
        lines = _dead_letter_lines(shown)
    else:
        lines = _unknown_lines(shown)
    for line in lines:
        # The terminal itself wraps: an id stays whole, and can be copied.
        console.print(line, soft_wrap=isinstance(line, Text))
    console.print()


def _heading(shown: Shown, *parts: str | tuple[str, str]) -> Text:
    return Text.assemble((f"{shown.at:%Y-%m-%d %H:%M:%S}Z  ", "dim"), *parts)


def _result_lines(shown: Shown) -> Iterator[Text | Table]:
    content = shown.content
    passages = "1 passage" if content["k_returned"] == 1 else f"{content['k_returned']} passages"
    yield _heading(shown, "event ", (content["event_id"], "bold"), f"  {content['profile']}")
    facts = [passages, f"{content['tokens_used']} tokens", f"{content['query_time_ms']:.0f} ms"]
    scopes = (("session", content["session_id"]), ("topic", content["topic_id"]))
    facts += [f"{name} {value}" for name, value in scopes if value is not None]
    yield Text(f"  {', '.join(facts)}", "dim")
    if content["warnings"]:
        yield Text(f"  warnings: {', '.join(content['warnings'])}", "yellow")
    if content["results"]:
        yield _passages(content["results"])


def _passages(results: list[Mapping[str, Any]]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1), expand=True)
    table.add_column("rank", justify="right", style="dim", width=4)
    table.add_column("scope", width=6)
    table.add_column("score", justify="right", width=6)
    table.add_column("passage", ratio=3, no_wrap=True, overflow="ellipsis")
    table.add_column("source", ratio=2, no_wrap=True, overflow="ellipsis", style="cyan")
    for passage in results:
        source = passage["title"] or passage["document_id"]
        page = "" if passage["page"] is None else f", p. {passage['page']}"
        text = " ".join(passage["text_content"].split())
        cells = (str(passage["rank"]), passage["scope"], f"{passage['score']:.3f}", text, source + page)
        table.add_row(*map(Text, cells))
    return table


def _dead_letter_lines(shown: Shown) -> Iterator[Text]:
    content = shown.content
    headers = [(name, value.encode()) for name, value in content["headers"].items()]
    where = f"partition {content['partition']}, offset {content['offset']}"
    event = ("event ", (content["event_id"] or "unknown", "bold"))
    key = "without a key" if content["key"] is None else f"key {content['key']}"
    try:
        origin, own = read_dead_letter(headers)
    except NotADeadLetter as error:
        yield _heading(shown, ("not a dead letter", "red"), "  ", *event)
        yield Text(f"  {key}")
        yield Text(f"  {error}; {where}", "dim")
        own = headers
    else:
        yield _heading(shown, (origin.code, "red"), "  ", *event)
        yield Text(f"  {key}")
        yield Text(f"  {content['headers'][MESSAGE_HEADER]}")
        read = f"read from {origin.topic}, partition {origin.partition}, offset {origin.offset}"
        if origin.placeholder is not None:
            first, last = origin.placeholder
            read += f"; stands for the offsets {first} to {last}"
        yield Text(f"  {read}; dead letter at {where}", "dim")
    if own:
        texts = (f"{name}={(value or b'').decode()}" for name, value in own)
        yield Text(f"  headers: {', '.join(texts)}", "dim")


def _unknown_lines(shown: Shown) -> Iterator[Text]:
    (problem, code), *where = shown.content.items()
    place = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in where)
    yield _heading(shown, (f"{problem}: {code}", "red"), f"  {place}")
