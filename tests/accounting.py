"""The accounting: every event that the input topic holds has become exactly one of a result and a dead letter.

An event that asked for a reply has one besides.

Pure: it knows neither Kafka nor Avro. Whoever reads the topics says which event a record belongs to.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Answer", "Asked", "Logged", "Verdict", "account"]

_MAX_NAMED = 10


@dataclass(frozen=True)
class Asked:
    """An event that was made.

    Attributes:
        name: its identity, which its answers carry.
        expects: the code of its dead letter; None: a result.
        wants_reply: whether it also asks for a reply.
    """

    name: str
    key: bytes | None
    expects: str | None = None
    wants_reply: bool = False


@dataclass(frozen=True)
class Logged:
    """An event where it stands in the input topic."""

    name: str
    partition: int
    offset: int


@dataclass(frozen=True)
class Answer:
    """A record that came out.

    Attributes:
        name: of the event that it answers.
        kind: the topic on which it came.
        content: everything in it that must be the same each time it comes.
        code: a dead letter's.
    """

    name: str
    kind: Literal["result", "dead_letter"]
    content: bytes
    code: str | None = None


@dataclass(frozen=True)
class Verdict:
    """What became of the events. All but the first and the last two must be empty; each line names an event.

    Attributes:
        events: in the input topic.
        lost: without an answer.
        unreplied: that asked for a reply and have none.
        both: with a result and a dead letter.
        wrong: with an answer of the other kind, or a dead letter with another code, than what was expected.
        strange: answers to what is not in the input topic and was not there either.
        differing: answered again with other bytes.
        vanished: the broker had acknowledged them, and the input topic does not have them: not the worker's loss.
        repeats: answers beyond an event's first.
        overtaken: events whose first answer came after that of a later event with the same key.
    """

    events: int
    lost: Sequence[str] = field(default=())
    unreplied: Sequence[str] = field(default=())
    both: Sequence[str] = field(default=())
    wrong: Sequence[str] = field(default=())
    strange: Sequence[str] = field(default=())
    differing: Sequence[str] = field(default=())
    vanished: Sequence[str] = field(default=())
    repeats: int = 0
    overtaken: int = 0

    def __str__(self) -> str:
        return f"{self.events} events, {len(self.lost)} lost, {len(self.strange)} strange, {self.repeats} repeats"

    @property
    def violations(self) -> Sequence[str]:
        """A line for each kind of violation, with the first events' names."""
        kinds = {
            "lost": self.lost,
            "without a reply": self.unreplied,
            "answered in both ways": self.both,
            "answered wrongly": self.wrong,
            "never asked": self.strange,
            "answered again with other bytes": self.differing,
            "acknowledged to the producer and gone": self.vanished,
        }
        return [
            f"{len(names)} {kind}: {', '.join(names[:_MAX_NAMED])}{', …' if len(names) > _MAX_NAMED else ''}"
            for kind, names in kinds.items()
            if names
        ]


def account(
    asked: Iterable[Asked],
    log: Iterable[Logged],
    answers: Iterable[Answer],
    *,
    acknowledged: Iterable[str] = (),
    replaceable: Iterable[str] = (),
    replies: Iterable[str] = (),
) -> Verdict:
    """Settle the account.

    Args:
        asked: every event that was made, whether or not the input topic took it.
        log: what the input topic holds.
        answers: what came out, in the order in which it came.
        acknowledged: names that the broker has confirmed.
        replaceable: names that a compacted topic may forget; answered or not.
        replies: names of the events to which each reply is one.
    """
    replied = {*replies}
    made = {event.name: event for event in asked}
    log = list(log)
    where = {event.name: f"{event.name} at [{event.partition}]@{event.offset}" for event in log}
    came: dict[str, list[Answer]] = defaultdict(list)
    rank: dict[str, int] = {}
    for number, answer in enumerate(answers):
        came[answer.name].append(answer)
        rank.setdefault(answer.name, number)
    return Verdict(
        events=len(log),
        lost=[place for name, place in where.items() if name not in came],
        unreplied=[
            place
            for name, place in where.items()
            if name in made and made[name].wants_reply and name not in replied
        ],
        both=[where.get(name, name) for name, of in came.items() if len({answer.kind for answer in of}) > 1],
        wrong=[
            f"{where.get(name, name)} ({found} instead of {made[name].expects or 'a result'})"
            for name, of in came.items()
            if name in made
            for found in {answer.code or "a result" for answer in of} - {made[name].expects or "a result"}
        ],
        strange=sorted({*came, *replied} - {*where} - {*replaceable}),
        differing=[
            where.get(name, name) for name, of in came.items() if len({(a.kind, a.content) for a in of}) > 1
        ],
        vanished=sorted({*acknowledged} - {*where} - {*replaceable}),
        repeats=sum(len(of) - 1 for of in came.values()),
        overtaken=_overtaken(made, log, rank),
    )


def _overtaken(made: dict[str, Asked], log: Iterable[Logged], rank: dict[str, int]) -> int:
    """Events whose first answer came after that of one behind them with the same key."""
    queues: dict[tuple[int, bytes | None], list[Logged]] = defaultdict(list)
    for event in log:
        if event.name in rank and event.name in made:
            queues[event.partition, made[event.name].key].append(event)
    overtaken = 0
    for queue in queues.values():
        earliest_behind = len(rank) + sum(rank.values()) + 1
        for event in sorted(queue, key=lambda event: event.offset, reverse=True):
            overtaken += rank[event.name] > earliest_behind
            earliest_behind = min(earliest_behind, rank[event.name])
    return overtaken
