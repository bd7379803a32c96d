"""Codecs: each inflates into what room there is, and a worker that lacks one does not start."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from aiokafka.codec import gzip_encode, lz4_encode, snappy_encode, zstd_encode

from streams.broker.compression import CODECS, inflate_into, missing_codecs
from streams.core.errors import UnreadableBatch

ROOT = Path(__file__).resolve().parents[2]
DATA = os.urandom(1000) + b"x" * 99_000
COMPRESSED = {
    "gzip": (1, gzip_encode(DATA)),
    "snappy": (2, bytes(snappy_encode(DATA, xerial_compatible=False))),
    "snappy in Java's frame": (2, snappy_encode(DATA)),
    "lz4": (3, lz4_encode(DATA)),
    "zstd": (4, zstd_encode(DATA)),
}


def inflate(codec: int, data: bytes, room: int) -> tuple[int | None, bytes]:
    buffer = bytearray(room + 10)
    size = inflate_into(codec, memoryview(data), memoryview(buffer)[:room])
    assert buffer[room:] == bytes(10)
    return size, bytes(buffer[: size or 0])


@pytest.mark.parametrize(("codec", "data"), COMPRESSED.values(), ids=COMPRESSED)
def test_inflates_into_just_the_room_there_is(codec: int, data: bytes) -> None:
    assert inflate(codec, data, len(DATA)) == (len(DATA), DATA)
    assert inflate(codec, data, len(DATA) + 1) == (len(DATA), DATA)
    assert inflate(codec, data, len(DATA) - 1)[0] is None


@pytest.mark.parametrize(("codec", "data"), COMPRESSED.values(), ids=COMPRESSED)
def test_corrupt_data_is_an_error_or_other_data(codec: int, data: bytes) -> None:
    for cut in (1, 3, len(data) // 2, len(data) - 5):
        with pytest.raises(UnreadableBatch):
            inflate(codec, data[:cut], len(DATA))
    for at in range(0, min(len(data), 1200), 7):
        bad = bytearray(data)
        bad[at] ^= 0xFF
        try:
            inflate(codec, bytes(bad), len(DATA))
        except UnreadableBatch as error:
            assert "\n" not in str(error)  # noqa: PT017  # it may as well not be raised


@pytest.mark.parametrize("codec", [0, 5, 6, 7])
def test_a_codec_that_kafka_does_not_have(codec: int) -> None:
    with pytest.raises(UnreadableBatch, match=str(codec)):
        inflate(codec, b"data", 10)


def test_this_installation_has_all_codecs() -> None:
    assert missing_codecs() == []
    assert set(CODECS.values()) == {"gzip", "snappy", "lz4", "zstd"}


@pytest.mark.parametrize(("command", "code"), [("worker", 1), ("check", 1)])
def test_a_missing_library_refuses_the_start(tmp_path: Path, command: str, code: int) -> None:
    (tmp_path / "cramjam.py").write_text("raise ImportError\n")
    done = subprocess.run(
        [sys.executable, "-m", "streams", command],
        cwd=ROOT,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(tmp_path),
            "DATABASE_CONNECTION_STRING": "postgresql://nobody@127.0.0.1:9/none",
            "KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:9",
            "COLUMNS": "300",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    said = " ".join((done.stdout + done.stderr).split())
    assert re.search(r"refused.* gzip, snappy, lz4, zstd.* pip install cramjam", said)
