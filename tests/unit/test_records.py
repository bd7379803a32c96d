"""Batches with headers' names that are no UTF-8, beside what aiokafka makes of them."""

import itertools

import pytest
from aiokafka.consumer import fetcher
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy
from aiokafka.record.memory_records import MemoryRecords

from streams.broker.records import _Records, escape_header_names

CODECS = {"none": 0, "gzip": 1}


class Name(str):
    """Asked for its bytes, gives others."""

    __slots__ = ()

    def encode(self, *_: object) -> bytes:
        return b"caf\xe9 " + str(self).encode("utf-8")


def batch(first: int, names: list[str], codec: str) -> bytes:
    builder = _DefaultRecordBatchBuilderPy(
        magic=2,
        compression_type=CODECS[codec],
        is_transactional=0,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=100_000,
    )
    for offset, name in enumerate(names):
        builder.append(
            offset, timestamp=7, key=b"k%d" % offset, value=b"v" * offset, headers=[("a", b"1"), (name, None)]
        )
    data = bytearray(builder.build())
    data[:8] = first.to_bytes(8, "big")  # as the broker does; the checksum begins behind it
    return bytes(data)


def read(records: object) -> list[tuple[object, ...]]:
    found = []
    while records.has_next():
        of = records.next_batch()
        assert of.validate_crc()
        assert not of.is_control_batch
        found += [(r.offset, r.timestamp, r.key, r.value, [*r.headers]) for r in of]
    return found


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [{0}, {2}, {4}, {1, 3}, {0, 1, 2, 3, 4}, set()], ids=str)
def test_a_bad_name_is_escaped_and_nothing_else_is_touched(codec: str, bad: set[int]) -> None:
    names = [Name("x") if number in bad else "x" for number in range(5)]
    log = batch(40, ["x"] * 3, codec) + batch(43, names, codec) + batch(48, ["x"], codec)
    good = batch(40, ["x"] * 3, codec) + batch(43, ["x"] * 5, codec) + batch(48, ["x"], codec)
    expected = read(MemoryRecords(good))
    for number in bad:
        expected[3 + number][4][1] = ("caf\\xe9 x", None)
    assert read(_Records(log)) == expected
    assert [offset for offset, *_ in expected] == [*range(40, 49)]


def test_a_batch_that_is_cut_off_is_left_for_the_next_fetch() -> None:
    log = batch(0, ["x", Name("x")], "none") + batch(2, ["x"], "none")
    for end in itertools.chain(range(0, len(log), 7), [len(log)]):
        ours, theirs = _Records(log[:end]), MemoryRecords(log[:end])
        assert ours.has_next() == theirs.has_next()
        assert ours.size_in_bytes() == theirs.size_in_bytes()


def test_consumers_read_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "MemoryRecords", MemoryRecords)
    escape_header_names()
    assert fetcher.MemoryRecords is _Records
