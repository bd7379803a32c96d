"""`anabranch replay`: replays dead letters, with output for people or machines."""

import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from rich.progress import Progress
from rich.table import Table

from streams.broker.topics import DEAD_LETTER_MARGIN_BYTES
from streams.core.embedding_errors import text_codes_that_fail_again
from streams.core.errors import codes_that_fail_again
from streams.replay.dead_letters import REFUSED, Disposition, ReplayFilter
from streams.replay.run import Replay
from streams.replay.tally import Tally
from streams.settings import Settings
from streams.terminal import Console, Text, json_text

__all__ = ["Outcome", "as_json", "period", "replay", "show"]

_AGO = re.compile(r"(\d{1,9})([smhd])", re.ASCII)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a replay.

    Attributes:
        rate: events per second; None if nothing was written.
        recovered: how many of the previously replayed ones an interrupted replay had not recorded.
        texts: whether the dead letters are an embedding stage's.
    """

    tally: Tally
    input_topic: str
    dead_letter_topic: str
    max_attempts: int
    rate: float | None
    recovered: int
    texts: bool = False


def period(
    since: str | None, until: str | None, *, now: datetime | None = None
) -> tuple[datetime | None, datetime | None]:
    """Parse two instants, each a date-time with an offset or a duration before now.

    Raises:
        ValueError: one is invalid, or the interval is empty; one line that names the option.
    """
    now = now or datetime.now(UTC)
    first, last = _instant("--since", since, now), _instant("--until", until, now)
    if first is not None and last is not None and first >= last:
        raise ValueError("--since must be before --until")
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
    # A time without an offset would mean a different instant on each machine.
    if instant is None or instant.tzinfo is None:
        raise ValueError(
            f"{option}: {text!r} is neither a date-time with an offset (2026-05-01T12:00:00Z) nor a duration (2h)"
        )
    return instant


async def replay(
    settings: Settings,
    options: dict[str, Any],
    *,
    replay_filter: ReplayFilter,
    max_attempts: int,
    rate: float | None,
    texts: bool = False,
) -> Outcome:
    """Preview (without a rate), or replay with this many events per second.

    Args:
        settings: for the topics.
        options: for the clients.
        replay_filter: which dead letters.
        max_attempts: skip events that were replayed this many times.
        rate: events per second; None: preview.
        texts: whether the settings are an embedding stage's.

    Raises:
        ReplayError: the replay is not possible.
        KafkaError: the broker is unreachable or rejects the request.
    """
    work = Replay(
        options,
        input_topic=settings.anabranch_input_topic,
        dead_letter_topic=settings.anabranch_dead_letter_topic,
        replay_filter=replay_filter,
        max_attempts=max_attempts,
    )
    if rate is None:
        tally = await work.preview()
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
        work.recovered,
        texts,
    )


def as_json(outcome: Outcome) -> str:
    """The result as one JSON object; the dispositions are those of `streams.replay.dead_letters`."""
    tally = outcome.tally
    return json_text(
        {
            "applied": outcome.rate is not None,
            "input_topic": outcome.input_topic,
            "dead_letter_topic": outcome.dead_letter_topic,
            "chosen": tally.total,
            **{disposition.value: tally.count(disposition) for disposition in Disposition},
            "recognised": outcome.recovered,
            "rows": tally.to_json(),
            "missing": [asdict(missing) for missing in tally.missing],
        }
    )


def show(outcome: Outcome, console: Console | None = None) -> None:
    """Print a table by code and partition, and why dead letters were skipped."""
    # Do not wrap the table if it goes to a file or a pipe.
    console = console or Console(width=None if sys.stdout.isatty() else 120)
    tally, applied = outcome.tally, outcome.rate is not None
    if not tally.total:
        console.print(f"no dead letters in {outcome.dead_letter_topic} match", soft_wrap=True)
        return
    shown = Table(box=None, pad_edge=False)
    headings = ("code", "partition", "selected", "replayed" if applied else "to replay", "already", "skipped")
    for heading in headings:
        shown.add_column(heading, justify="left" if heading == "code" else "right")
    shown.add_column("oldest")
    shown.add_column("newest")
    for row in tally.rows:
        shown.add_row(
            Text("not by Anabranch", "dim") if row.code is None else row.code,
            str(row.partition),
            str(row.dispositions.total()),
            str(row.dispositions[Disposition.REPLAY]),
            str(row.dispositions[Disposition.ALREADY_REPLAYED]),
            Text(str(row.refused), "red" if row.refused else ""),
            f"{row.oldest:%Y-%m-%d %H:%M:%SZ}",
            f"{row.newest:%Y-%m-%d %H:%M:%SZ}",
        )
    console.print(shown)
    if outcome.recovered:
        console.print(
            f"{outcome.recovered} of the already replayed dead letters were found in {outcome.input_topic}:"
            " an interrupted replay had published them",
            soft_wrap=True,
        )
    for disposition in Disposition:
        if disposition in REFUSED and tally.count(disposition):
            console.print(_skip_reason(outcome, disposition), soft_wrap=True)
    for line in _conclusion(outcome):
        console.print(line, soft_wrap=True)


def _conclusion(outcome: Outcome) -> list[str]:
    """What was replayed and how to check, or what would be."""
    due = outcome.tally.count(Disposition.REPLAY)
    if outcome.rate is not None:
        done = [f"replayed {due} to {outcome.input_topic}"]
        if due:
            done.append(
                "events that fail again become new dead letters: anabranch tail --dead-letters --from-beginning"
                + (" --texts" if outcome.texts else "")
            )
        return done
    if not due:
        return []
    failing = _events_that_fail_again(outcome.tally)
    return [
        *([failing] if failing else []),
        f"nothing was written; use --apply to replay {due} to {outcome.input_topic}",
    ]


def _events_that_fail_again(tally: Tally) -> str | None:
    counts: Counter[str] = Counter()
    for row in tally.rows:
        if row.code in codes_that_fail_again() | text_codes_that_fail_again():
            counts[row.code] += row.dispositions[Disposition.REPLAY]
    if not (number := counts.total()):
        return None
    return (
        f"{number} will fail again ({', '.join(+counts)}): publish corrected events instead, and replay the others"
        " with --code"
    )


def _skip_reason(outcome: Outcome, disposition: Disposition) -> Text:
    reason = {
        Disposition.EXHAUSTED: f"replayed {outcome.max_attempts} times or more and dead-lettered again"
        " (--max-attempts)",
        Disposition.OTHER_TOPIC: f"not read from {outcome.input_topic}"
        f" ({'ANABRANCH_TEXT_TOPIC' if outcome.texts else 'ANABRANCH_INPUT_TOPIC'})",
        Disposition.NOT_A_DEAD_LETTER: "not written by Anabranch (no header anabranch.error.code)",
        Disposition.TOO_LARGE: f"too large for {outcome.input_topic} with the replay headers:"
        f" increase its max.message.bytes by {DEAD_LETTER_MARGIN_BYTES}, then replay again",
        Disposition.PLACEHOLDER: "placeholders, which cannot be replayed: they do not contain their events;"
        " read these offsets from their topic, and publish the events again",
        Disposition.DELETED: "deleted by retention during the replay",
    }[disposition]
    count = outcome.tally.count(disposition)
    positions = [f"[{partition}]@{offset}" for partition, offset in outcome.tally.positions(disposition)]
    if disposition is Disposition.PLACEHOLDER:
        positions = [str(missing) for missing in outcome.tally.missing]
    more = ", …" if count > len(positions) else ""
    return Text.assemble(("skipped", "red"), f" {count} × {reason}: {', '.join(positions)}{more}")
