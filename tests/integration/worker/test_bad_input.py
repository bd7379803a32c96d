"""Bad input stops nothing: one dead letter each, byte for byte, and the good events around it are answered."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from tests.bad_inputs import BAD_INPUTS
from tests.conftest import Database
from tests.integration.corpora import unit_vectors
from tests.integration.harness import Channel, OutputReader, Worker, as_avro, as_json, event_id_of, query

MODEL = "all-mpnet-base-v2"
VECTOR = unit_vectors(1, 3)[0]
HEADERS = [
    ("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    ("x", b""),
    ("x", b"2"),
]


def meaningless() -> list[tuple[str, bytes, str]]:
    """Sound events that this worker cannot answer."""
    past = (datetime.now(UTC) - timedelta(seconds=1)).isoformat()
    return [
        ("unknown profile", as_json(query(VECTOR, profile="nonesuch")), "unknown_profile"),
        ("unknown profile in Avro", as_avro(query(VECTOR, profile="")), "unknown_profile"),
        ("another model", as_json(query(VECTOR, embedding_model="text-embedding-3")), "model_mismatch"),
        ("another model in Avro", as_avro(query(VECTOR, embedding_model=MODEL.upper())), "model_mismatch"),
        ("expired", as_json(query(VECTOR, expires_at=past)), "expired"),
        ("expired in Avro", as_avro(query(VECTOR, expires_at="1970-01-01T00:00:00Z")), "expired"),
    ]


async def test_each_kind_becomes_one_dead_letter(
    database: Database,
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
    figures: Callable[[str], None],
) -> None:
    worker = start_worker(database.worker, ANABRANCH_EMBEDDING_MODEL=MODEL)
    await worker.until_ready()
    bad = BAD_INPUTS + meaningless()
    sent: dict[tuple[int, int], tuple[str, bytes | None, bytes, str]] = {}
    good = set()
    for number, (name, value, code) in enumerate(bad):
        key = None if number % 10 == 0 else f"bad {name}".encode() + b"\xff"
        place = await channel.send(value, key, HEADERS)
        sent[place] = (name, key, value, code)
        # A tombstone asks nothing; whatever its key and headers are.
        if number % 20 == 0:
            await channel.send(None, b"tombstone", HEADERS)
        event = query(VECTOR, embedding_model=(MODEL, None)[number % 2])
        await channel.send((as_json if number % 3 else as_avro)(event), b"good")
        good.add(event["event_id"])
    # Whatever is still to come has come when these are answered: one behind the last event of each partition.
    for partition in range(3):
        event = query(VECTOR)
        await channel.send(as_json(event), b"good", partition=partition)
        good.add(event["event_id"])
    await output_reader.until_answered(good, seconds=60)
    await output_reader.until(dead_letters=len(sent))

    problems = []
    for record in output_reader.dead_letters:
        headers = dict(record.headers[len(HEADERS) :])
        origin = int(headers["__connect.errors.partition"]), int(headers["__connect.errors.offset"])
        if origin not in sent:
            problems.append(f"a second dead letter, or one of nobody's: {headers}")
            continue
        name, key, value, code = sent.pop(origin)
        expected = {
            "__connect.errors.topic": channel.input.encode(),
            "__connect.errors.partition": str(origin[0]).encode(),
            "__connect.errors.offset": str(origin[1]).encode(),
            "__connect.errors.stage": b"decode",
            "anabranch.error.code": code.encode(),
        }
        if (record.key, record.value) != (key, value):
            problems.append(f"{name}: key or value are not what was sent")
        if list(record.headers[: len(HEADERS)]) != HEADERS:
            problems.append(f"{name}: headers were {record.headers}")
        if headers.keys() != expected.keys() | {
            "__connect.errors.class.name",
            "__connect.errors.exception.message",
        }:
            problems.append(f"{name}: error headers were {headers}")
        problems += [
            f"{name}: {header} is {headers.get(header)!r}, not {wanted!r}"
            for header, wanted in expected.items()
            if headers.get(header) != wanted
        ]
    problems += [f"{name}: no dead letter" for name, *_ in sent.values()]
    assert problems == []
    assert sorted(map(event_id_of, output_reader.results)) == sorted(good)  # each once
    assert all(record.key == b"good" for record in output_reader.results)

    samples = await worker.scrape()
    tombstones = samples.value("anabranch_events_total", outcome="skipped")
    assert tombstones == len(range(0, len(bad), 20))
    assert samples.value("anabranch_events_total", outcome="dead_lettered") == len(bad)
    assert samples.value("anabranch_events_total", outcome="answered") == len(good)
    codes = samples.nonzero("anabranch_dead_letters_total")
    assert codes == {(code,): sum(other == code for *_, other in bad) for *_, code in bad}
    assert samples.total("anabranch_retries_total") == 0
    assert "Traceback" not in worker.log
    figures(f"{len(bad)} kinds of bad input with {len(good)} good events between them; {len(codes)} codes")
    assert len(bad) > 150
