"""`anabranch replay`: dead letters on their way back, for people and machines."""

import json
import re
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from streams.broker.topics import DEAD_LETTER_MARGIN_BYTES
from streams.replay.dead_letters import REFUSED, Disposition, ReplayFilter
from streams.replay.run import Replay
from streams.replay.tally import Tally
from streams.settings import Settings

__all__ = ["Outcome", "as_json", "period", "replay", "show"]

_AGO = re.compile(r"(\d{1,9})([smhd])", re.ASCII)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What to show.

    Attributes:
        rate: events a second; None where nothing was written.
        recognised: of those replayed before, how many an interrupted replay had not written down.
    """

    tally: Tally
    input_topic: str
    dead_letter_topic: str
    max_attempts: int
    rate: float | None
    recognised: int


def period(
    since: str | None, until: str | None, *, now: datetime | None = None
) -> tuple[datetime | None, datetime | None]:
    """Read two instants, each a date-time with an offset or so long ago.

    Raises:
        ValueError: one cannot be read, or nothing lies between them; one line that names the option.
    """
    now = now or datetime.now(UTC)
    first, last = _instant("--since", since, now), _instant("--until", until, now)
    if first is not None and last is not None and first >= last:
        raise ValueError("--since is not before --until")
    return first, last


def _instant(option: str, text: str | None, now: datetime) -> datetime | None:
    if text is None:
        return None
    ago = _AGO.fullmatch(text)
    try:
        if ago is not None:
            return now - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
        instant = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        instant = None
    # A time without an offset is another one on each machine.
    if instant is None or instant.tzinfo is None:
        raise ValueError(
            f"{option}: {text!r} is neither a date-time with an offset (2026-05-01T12:00:00Z) nor so long ago (2h)"
        )
    return instant


async def replay(
    settings: Settings,
    options: dict[str, Any],
    *,
    choice: ReplayFilter,
    max_attempts: int,
    rate: float | None,
) -> Outcome:
    """Look, or replay at so many events a second.

    Raises:
        ReplayError: it cannot be done.
        KafkaError: the broker cannot be reached or refuses.
    """
    work = Replay(
        options,
        input_topic=settings.anabranch_input_topic,
        dead_letter_topic=settings.anabranch_dead_letter_topic,
        choice=choice,
        max_attempts=max_attempts,
    )
    if rate is None:
        tally = await work.look()
    else:
        with Progress(
            console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
        ) as progress:
            task = progress.add_task("replaying", total=None)
            tally = await work.apply(
                rate=rate,
                on_progress=lambda done, total: progress.update(task, completed=done, total=total),
            )
    return Outcome(
        tally,
        settings.anabranch_input_topic,
        settings.anabranch_dead_letter_topic,
        max_attempts,
        rate,
        work.recognised,
    )


def as_json(outcome: Outcome) -> str:
    """One object; the fates are those of `streams.replay.dead_letters`."""
    tally = outcome.tally
    return json.dumps(
        {
            "applied": outcome.rate is not None,
            "input_topic": outcome.input_topic,
            "dead_letter_topic": outcome.dead_letter_topic,
            "chosen": tally.total,
            **{fate.value: tally.count(fate) for fate in Disposition},
            "recognised": outcome.recognised,
            "rows": tally.to_json(),
        }
    )


def show(outcome: Outcome, console: Console | None = None) -> None:
    """Print a table by code and partition, and why something was left."""
    # A table that goes into a file or a pipe has no lines to break.
    console = console or Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    tally, applied = outcome.tally, outcome.rate is not None
    if not tally.total:
        console.print(f"no dead letter of {outcome.dead_letter_topic} was chosen", soft_wrap=True)
        return
    shown = Table(box=None, pad_edge=False)
    for heading in ("code", "partition", "chosen", "replayed" if applied else "to replay", "before", "left"):
        shown.add_column(heading, justify="left" if heading == "code" else "right")
    shown.add_column("oldest")
    shown.add_column("newest")
    for row in tally.rows:
        shown.add_row(
            row.code or "[dim]not Anabranch’s[/]",
            str(row.partition),
            str(row.fates.total()),
            str(row.fates[Disposition.REPLAY]),
            str(row.fates[Disposition.ALREADY]),
            f"[red]{row.refused}[/]" if row.refused else "0",
            f"{row.oldest:%Y-%m-%d %H:%M:%SZ}",
            f"{row.newest:%Y-%m-%d %H:%M:%SZ}",
        )
    console.print(shown)
    if outcome.recognised:
        console.print(
            f"{outcome.recognised} of those replayed before were found in {outcome.input_topic},"
            " where an interrupted replay had put them",
            soft_wrap=True,
        )
    for fate in Disposition:
        if fate in REFUSED and tally.count(fate):
            console.print(_why(outcome, fate), soft_wrap=True)
    due = tally.count(Disposition.REPLAY)
    if applied:
        console.print(f"replayed {due} to {outcome.input_topic}", soft_wrap=True)
    elif due:
        console.print(f"nothing was written; --apply sends {due} to {outcome.input_topic}", soft_wrap=True)


def _why(outcome: Outcome, fate: Disposition) -> str:
    reason = {
        Disposition.EXHAUSTED: f"replayed {outcome.max_attempts} times or more and back again (--max-attempts)",
        Disposition.ELSEWHERE: f"not read from {outcome.input_topic} (ANABRANCH_INPUT_TOPIC)",
        Disposition.FOREIGN: "not written by Anabranch (no header anabranch.error.code)",
        Disposition.TOO_LARGE: f"too large for {outcome.input_topic} with the marks:"
        f" raise its max.message.bytes by {DEAD_LETTER_MARGIN_BYTES}, then replay again",
        Disposition.GONE: "removed by retention meanwhile",
    }[fate]
    places = outcome.tally.places(fate)
    count = outcome.tally.count(fate)
    named = ", ".join(f"\\[{partition}]@{offset}" for partition, offset in places)
    return f"[red]left[/] {count} × {reason}: {named}{', …' if count > len(places) else ''}"
