"""Batches as a consumer of ours reads them, beside what aiokafka makes of them."""

import itertools
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from aiokafka.consumer import fetcher
from aiokafka.record.memory_records import MemoryRecords
from aiokafka.structs import TopicPartition

from streams.broker.records import ReadBudget, Unreadable, _Records, patch_fetcher
from tests.batches import batch, gzipped, zstd_repeated, zstd_stored

CODECS: dict[str, Callable[[bytes], bytes]] = {"none": bytes, "gzip": gzipped, "zstd": zstd_stored}
PLACE = TopicPartition("topic", 2)
THEIRS = fetcher.PartitionRecords
LIMIT = 100_000
MAX_HEADERS = 10_000
EMPTY = ("", b"")  # two bytes on the wire, a hundred in memory


@pytest.fixture(autouse=True)
def reading(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MemoryRecords", "PartitionRecords"):
        monkeypatch.setattr(fetcher, name, getattr(fetcher, name))
    patch_fetcher(LIMIT)


class Name(str):
    """Asked for its bytes, gives others."""

    __slots__ = ()

    def encode(self, *_: object) -> bytes:
        return b"caf\xe9 " + str(self).encode("utf-8")


def of(first: int, names: list[str], codec: str = "none", **options: Any) -> bytes:
    records = [(b"k%d" % at, b"v" * at, [("a", b"1"), (name, None)]) for at, name in enumerate(names)]
    return batch(records, codec, CODECS[codec], first=first, **options)


def read(records: object, at: int, kind: Any = None) -> tuple[list[Any], int]:
    """What a fetch at an offset brings, and where the next begins."""
    reader = (kind or fetcher.PartitionRecords)(
        PLACE,
        records,
        None,
        at,
        None,
        None,
        True,  # noqa: FBT003  # as aiokafka calls it
        fetcher.READ_COMMITTED,
    )
    found = [
        (r.offset, r.value)
        if isinstance(r.value, Unreadable)
        else (r.offset, r.timestamp, r.key, r.value, [*r.headers])
        for r in reader
    ]
    return found, reader.next_fetch_offset


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [{0}, {2}, {4}, {1, 3}, {0, 1, 2, 3, 4}, set()], ids=str)
def test_a_bad_name_is_escaped_and_nothing_else_is_touched(codec: str, bad: set[int]) -> None:
    names = [Name("x") if number in bad else "x" for number in range(5)]
    log = of(40, ["x"] * 3, codec) + of(43, names, codec) + of(48, ["x"], codec)
    good = of(40, ["x"] * 3) + of(43, ["x"] * 5) + of(48, ["x"])
    expected, end = read(MemoryRecords(good), 41, THEIRS)
    for number in bad:
        expected[2 + number][4][1] = ("caf\\xe9 x", None)
    assert read(_Records(log), 41) == (expected, end)
    assert [offset for offset, *_ in expected] == [*range(41, 49)]


def test_a_batch_that_is_cut_off_is_left_for_the_next_fetch() -> None:
    first = of(0, ["x", Name("x")])
    log = first + of(2, ["x"])
    for end in itertools.chain(range(len(first), len(log), 7), [len(log)]):
        ours, theirs = _Records(log[:end]), MemoryRecords(log[:end])
        assert ours.has_next() == theirs.has_next()
        assert ours.size_in_bytes() == theirs.size_in_bytes()
        assert [offset for offset, *_ in read(ours, 0)[0]] == [0, 1, 2][: 2 + (end == len(log))]


DAMAGE = {
    "checksum": of(43, ["x"] * 4, damaged=True),
    "unknown codec": batch([(b"k", b"v", [])] * 4, 6, first=43),
    "gzip": batch([(b"k", b"v", [])] * 4, "gzip", first=43),
    "snappy": batch([(b"k", b"v", [])] * 4, "snappy", lambda data: b"\x82SNAPPY\0" + data, first=43),
    "lz4": batch([(b"k", b"v", [])] * 4, "lz4", first=43),
    "zstd": batch([(b"k", b"v", [])] * 4, "zstd", lambda data: zstd_stored(data)[:-2], first=43),
    "records": batch([(b"k", b"v", [])] * 4, compress=lambda data: b"\xff" + data[1:], first=43),
}


@pytest.mark.parametrize("bad", DAMAGE.values(), ids=DAMAGE)
def test_three_fresh_fetches_and_then_a_placeholder(bad: bytes) -> None:
    log = of(40, ["x"] * 3) + bad + of(47, ["x"])
    found, at = read(_Records(log), 40)
    assert ([offset for offset, *_ in found], at) == ([40, 41, 42], 43)
    for _ in range(2):
        assert read(_Records(bad + of(47, ["x"])), 43) == ([], 43)
    found, at = read(_Records(bad + of(47, ["x"])), 43)
    [(offset, value), *rest] = found
    assert offset == 46
    assert (value.first, value.last, value.size) == (43, 46, len(bad))
    assert value.error.code == "unreadable_batch"
    if at == 47:  # behind a damaged header nothing is taken for granted
        rest, at = read(_Records(of(47, ["x"])), 47)
    assert ([offset for offset, *_ in rest], at) == ([47], 48)


def test_what_was_damaged_on_its_way_is_read_when_it_comes_again() -> None:
    good, bad = of(40, ["x"] * 3), of(40, ["x"] * 3, damaged=True)
    for _ in range(2):  # a rebalance may bring it back
        for _ in range(3):
            assert read(_Records(bad), 40) == ([], 40)
        found, at = read(_Records(good), 40)
        assert ([offset for offset, *_ in found], at) == ([40, 41, 42], 43)


@pytest.mark.parametrize("at", [8, 9, 10, 11, 23, 24, 25, 26, 57, 58, 59, 60])
def test_a_damaged_header_hides_no_batch_behind_it(at: int) -> None:
    """The length, the last offset and the number of records: whatever one of them says, 44 is read."""
    for bit in range(8):
        bad = bytearray(of(40, ["x"] * 4))
        bad[at] ^= 1 << bit
        log, at_offset, lost = bytes(bad), 40, set()
        while at_offset < 44:
            found, at_offset = read(_Records(log + of(44, ["x"])), at_offset)
            lost |= {o for _, value in found for o in range(value.first, value.last + 1)}
        assert lost == {40, 41, 42, 43}


def test_what_can_be_read_of_a_batch_is_read() -> None:
    log = batch([(b"k", b"v", [])] * 4, compress=lambda data: data[:-1], first=40)
    found, at = read(_Records(log), 40)
    assert ([offset for offset, *_ in found], at) == ([40, 41, 42], 43)
    for _ in range(2):
        assert read(_Records(log), 43) == ([], 43)
    [(offset, value)], at = read(_Records(log), 43)
    assert (offset, value.first, value.last, at) == (43, 43, 43, 44)


def test_what_inflates_beyond_the_limit_is_represented_at_once() -> None:
    plain = batch([(b"k", b"\0" * LIMIT, [])])[61:]
    bombs = [
        batch([(b"k", b"\0" * LIMIT, [])], "gzip", gzipped, first=40),
        batch([(b"k", b"", [])], "zstd", lambda _: zstd_repeated(1 << 28, head=b"a", tail=b"b"), first=40),
        batch([(b"k", b"", [])], "snappy", lambda _: b"\xff\xff\xff\xff\x0f" + plain[:50], first=40),
    ]
    for bomb in bombs:
        found, at = read(_Records(bomb + of(41, ["x"])), 40)
        [(offset, value), (behind, *_)] = found
        assert (offset, value.error.code, value.first, value.last, behind, at) == (
            *(40, "record_too_large", 40, 40),
            *(41, 42),
        )


@pytest.mark.parametrize("codec", ["gzip", "zstd"])
def test_a_batch_of_just_the_limit_is_read(codec: str) -> None:
    for excess in (0, 1):
        size = LIMIT + excess - (len(batch([(b"k", b"v" * LIMIT, [])])) - 61 - LIMIT)
        log = batch([(b"k", b"v" * size, [])], codec, CODECS[codec], first=40)
        [(_, *rest)], _ = read(_Records(log), 40)
        assert isinstance(rest[0], Unreadable) == bool(excess)


def test_an_allowance_leaves_the_rest_for_later() -> None:
    budget = ReadBudget(3_000)
    patch_fetcher(LIMIT, budget)
    log = batch([(b"k", b"v" * 1000, [])] * 10, "gzip", gzipped, first=40)
    at, read_at_once = 40, []
    while at < 50:
        budget.renew()
        found, at = read(_Records(log), at)
        read_at_once.append([offset for offset, *_ in found])
    assert read_at_once == [[40, 41], [42, 43], [44, 45], [46, 47], [48, 49]]


@pytest.mark.parametrize("headers", [[("name", b"h" * 1000)], [EMPTY] * 10], ids=["large", "many"])
def test_an_allowance_covers_headers(headers: list[tuple[str, bytes]]) -> None:
    budget = ReadBudget(3_000)
    patch_fetcher(LIMIT, budget)
    log = batch([(None, None, headers)] * 4, first=40)
    at, read_at_once = 40, []
    while at < 44:
        budget.renew()
        found, at = read(_Records(log), at)
        read_at_once.append([offset for offset, *_ in found])
    assert read_at_once == [[40, 41], [42, 43]]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", ["x", Name("x")], ids=["good name", "bad name"])
def test_a_record_with_too_many_headers_is_represented_at_once(codec: str, name: str) -> None:
    patch_fetcher(LIMIT, ReadBudget(100 * LIMIT), max_headers=MAX_HEADERS)
    for excess in (0, 1):
        records = [
            (b"k", b"v", [(name, b"")]),
            (b"k", b"v" * 1000, [EMPTY] * (MAX_HEADERS + excess)),
            (b"k", b"v", []),
        ]
        log = batch(records, codec, CODECS[codec], first=40) + of(43, ["x"])
        tracemalloc.start()
        found, at = read(_Records(log), 40)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert at == 44
        if excess:
            (first, *_), (placeholder, value), (behind, *_) = found
            assert (first, placeholder, behind) == (40, 42, 43)
            assert (value.error.code, value.first, value.last) == ("record_too_large", 41, 42)
            assert peak < 1024 * 1024
        else:
            assert [offset for offset, *_ in found] == [40, 41, 42, 43]


@pytest.mark.parametrize("codec", ["none", "gzip"])
def test_without_an_allowance_a_partition_is_read_a_limit_at_a_time(codec: str) -> None:
    log = b"".join(
        batch([(b"k", b"v" * 20_000, [])] * 4, codec, CODECS[codec], first=first) for first in (0, 4, 8)
    )
    at, read_at_once = 0, []
    while at < 12:
        found, at = read(_Records(log), at)
        read_at_once.append([offset for offset, *_ in found])
    assert read_at_once == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]


def test_consumers_read_by_it() -> None:
    assert fetcher.MemoryRecords is _Records
    assert issubclass(fetcher.PartitionRecords.func, THEIRS)
