"""A header's name is text to every client, and any bytes to a broker."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable

from tests.conftest import Database
from tests.integration.corpora import load, tiny_corpus, unit_vectors
from tests.integration.harness import Channel, OutputReader, Worker, as_avro, query

# aiokafka's own builder, in Python, asks the name for its bytes.
_SEND = """
import asyncio, sys
from aiokafka import AIOKafkaProducer

class Name(str):
    def encode(self, *_):
        return b"\\xff"

async def send():
    producer = AIOKafkaProducer(bootstrap_servers=sys.argv[1])
    await producer.start()
    await producer.send_and_wait(sys.argv[2], b"{}", headers=[(Name(), b"")], partition=0)
    await producer.stop()

asyncio.run(send())
"""


async def test_a_name_that_is_no_utf_8_stops_nothing(
    database: Database, channel: Channel, output_reader: OutputReader, start_worker: Callable[..., Worker]
) -> None:
    await load(database.writer, tiny_corpus())
    worker = start_worker(database.worker)
    await worker.until_ready()
    await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", _SEND, channel.bootstrap_servers, channel.input],
        env={**os.environ, "AIOKAFKA_NO_EXTENSIONS": "1"},
        check=True,
        timeout=30,
    )
    events = [query(unit_vectors(1, 1)[0]) for _ in range(6)]
    for number, event in enumerate(events):
        await channel.send(as_avro(event), partition=number % 3)
    await output_reader.until_answered({event["event_id"] for event in events}, seconds=30)
    await output_reader.until(dead_letters=1)
    [dead_letter] = output_reader.dead_letters
    assert dead_letter.value == b"{}"
    assert dead_letter.headers[0] == ("\\xff", b"")
    assert worker.process.poll() is None
