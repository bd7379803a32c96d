"""Hostile messages out of valid ones. Each is made from a seed and a number alone, and so can be made again."""

import random
from collections.abc import Callable, Sequence

from tests.bad_inputs import head, zigzag
from tests.fuzz.seeds import CONFLUENT, QUERIES, Subject

__all__ = ["hostile"]

_BITS: Sequence[bytes] = [
    *(
        b"\0",
        b"\xff",
        b"\x80",
        b"\x7f",
        b"\x01",
        b"\xc3\x01",
        CONFLUENT,
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
    ),
    *(b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\\u", b"\\ud800", b"\\u0000", b"e9", b"-", b"NaN"),
    *(b"1e400", b"-0", b"0.", b"null", b"true", b'"k":', b'"principals":', b'"embedding":', b'"filters":'),
]
_NUMBERS = [
    *(0, 1, -1, 2, -2, 63, 64, 767, 768, 769, -768, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1),
    *(2**40, -(2**40), 2**60, -(2**60), 2**63 - 1, -(2**63), 2**63, 2**64, 2**70),
]
# A small thing again and again: what each takes when decoded is what counts.
_UNITS = [
    *(b"0", b"-1", b"1.5", b"1e9", b"null", b"true", b'""', b'"a"', b'"\\u0000"', b"[]", b"{}", b"[[]]"),
    *(b'{"a":0}', b'{"a":[]}', b'"\xf0\x9f\x98\x80"', b'"\\ud83d\\ude00"'),
]
_MAX_BOMB = 48 * 1024


def hostile(seed: int, number: int, subject: Subject = QUERIES) -> bytes:
    """The message of this number."""
    rng = random.Random(f"{seed}:{number}")
    return rng.choices(_WAYS, _WEIGHTS)[0](rng, subject)


def _mutated(rng: random.Random, subject: Subject) -> bytes:
    """Bits flipped, bytes replaced, taken out and put in; broken off; parts of itself and of others spliced in."""
    mutated = bytearray(rng.choice(list(subject.seeds.values())))
    for _ in range(rng.choice([1, 1, 1, 2, 5, 20])):
        at = rng.randrange(len(mutated) + 1)
        match rng.randrange(8):
            case 0 if at < len(mutated):
                mutated[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(mutated):
                mutated[at] = rng.randrange(256)
            case 2:
                mutated[at:at] = rng.choice(_BITS)
            case 3:
                del mutated[at : at + rng.choice([1, 2, 8, 100])]
            case 4:
                other = rng.randrange(len(mutated) + 1)
                mutated[at:at] = mutated[other : other + rng.randrange(40)]
            case 5:
                other_seed = rng.choice(list(subject.seeds.values()))
                start = rng.randrange(len(other_seed))
                mutated[at:] = other_seed[start:] if rng.random() < 0.5 else other_seed[at:]
            case 6:
                varint = zigzag(rng.choice(_NUMBERS))
                mutated[at : at + rng.choice([0, 1, len(varint)])] = varint
            case _:
                del mutated[at:]
        if not mutated:
            break
    return bytes(mutated)


def _avro_lengths(rng: random.Random, subject: Subject) -> bytes:
    """A field whose lengths and counts are not what is there; beside others that are sound."""
    return subject.avro(
        {rng.choice(subject.fields): _lies(rng) for _ in range(rng.choice([1, 1, 2]))},
        **(subject.short if rng.random() < 0.8 else subject.long),
    )


def _lies(rng: random.Random) -> bytes:
    size = rng.choice([0, 1, 3, 100, 3072, rng.randrange(_MAX_BOMB)])
    match rng.randrange(6):
        case 0:  # so many bytes or items
            return zigzag(rng.choice(_NUMBERS)) + rng.randbytes(min(size, 64))
        case 1:  # a block that says how many bytes it has
            count, length = rng.choice(_NUMBERS), rng.choice([*_NUMBERS, size])
            return zigzag(-abs(count)) + zigzag(length) + b"\0" * size + b"\0"
        case 2:  # blocks without end
            return zigzag(rng.choice([1, 2])) * size
        case 3:  # empty items, as many as there are bytes
            return zigzag(size) + b"\0" * size + b"\0"
        case 4:  # many blocks of one item
            return b"\x02\0" * (size // 2) + b"\0"
        case _:  # a branch, then anything
            return zigzag(rng.choice([0, 1, 1, 2, -1])) + zigzag(rng.choice(_NUMBERS)) + b"\x02a" * size


def _avro_entries(rng: random.Random, subject: Subject) -> bytes:
    """Maps with as many entries as there is room for."""
    count = rng.randrange(1, 8000)
    bad = rng.choice([b"\0", b"a", b""])
    entries = b"".join(
        zigzag(len(key)) + key + zigzag(len(bad)) + bad for key in (b"%x" % n for n in range(count))
    )
    filters = b"\x02" + b"\0" * 3 + b"\x02" + zigzag(count) + entries + b"\0"
    return subject.avro({"filters": filters}, **subject.short)


def _json_repeated(rng: random.Random, subject: Subject) -> bytes:
    """A field with many small things in it: elements, entries, or one in the other."""
    unit = rng.choice(_UNITS)
    count = rng.randrange(1, _MAX_BOMB // len(unit))
    match rng.randrange(4):
        case 0:
            bomb = b"[" + b",".join([unit] * count) + b"]"
        case 1:
            # Keys that differ: the same one twice is refused.
            bomb = b"{" + b",".join(b'"%x":' % n + unit for n in range(min(count, 6000))) + b"}"
        case 2:
            opened, closed = rng.choice([(b"[", b"]"), (b'{"a":', b"}"), (b'[0,{"":', b"}]")])
            depth = rng.choice([10, 500, 900, 990, 1000, 3000, 20_000])
            bomb = opened * depth + unit + closed * rng.choice([depth, depth, depth - 1, 0])
        case _:
            bomb = b'"' + (unit.strip(b'"{}[]') or b" ") * count + b'"'
    return _put(rng, subject, bomb)


def _json_numbers(rng: random.Random, subject: Subject) -> bytes:
    """Numbers of many digits, large exponents, and forms that are none."""
    digits = rng.choice([b"9", b"1", b"0"]) * rng.choice([1, 20, 64, 65, 400, 5000, _MAX_BOMB])
    form = rng.choice(
        [b"%s", b"-%s", b"1.%s", b"0.%s", b"1e%s", b"1e-%s", b"%s.0", b"1E+%s", b"[%s]", b"%se5"]
    )
    return _put(rng, subject, form % digits)


def _put(rng: random.Random, subject: Subject, bomb: bytes) -> bytes:
    """Into a place of an event that is otherwise sound."""
    name = rng.choice([*subject.fields, "filters", "metadata", "unknown", "unknown"])
    changed = {"filters": {"metadata": "\x1a"}} if name == "metadata" else {name: "\x1a"}
    return subject.json(**{**subject.short, **changed}).replace(b'"\\u001a"', bomb)


def _noise(rng: random.Random, subject: Subject) -> bytes:
    """Anything, behind a beginning that makes the decoder take it seriously."""
    start = rng.choice(
        [b"", b"{", b"[", head(subject.writer), CONFLUENT, b"\0", b"\xc3\x01", b'{"schema_version": "1.0.0"']
    )
    return start + rng.randbytes(rng.randrange(rng.choice([4, 60, 2000])))


_WAYS: Sequence[Callable[[random.Random, Subject], bytes]] = [
    _mutated,
    _avro_lengths,
    _avro_entries,
    _json_repeated,
    _json_numbers,
    _noise,
]
_WEIGHTS = [65, 18, 1, 4, 5, 7]
