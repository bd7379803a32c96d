"""Spring's own `ReplyingKafkaTemplate` asks a worker: the class of docs/request-reply.md, run as it stands there."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import Database
from tests.integration.corpora import load, tiny_corpus, unit_vectors
from tests.integration.harness import Channel, OutputReader, Worker, as_json, query
from tests.integration.kafka.apache_kafka import VERSION
from tests.integration.maven import Artifact, Unresolved, resolved
from tests.left_out import unavailable

ROOT: Final = Path(__file__).resolve().parents[3]
SPRING: Final = "4.0.2"
ARTIFACTS: Final[list[Artifact]] = [
    ("org.springframework.kafka", "spring-kafka", SPRING),
    ("org.apache.kafka", "kafka-clients", VERSION),  # as the broker's, so that it is there already
    ("org.apache.avro", "avro", "1.12.1"),
]
PARTITION: Final = 2
EVENTS: Final = 30


@pytest.fixture(scope="session")
def spring_jars() -> Path:
    try:
        return resolved(f"spring-kafka-{SPRING}", ARTIFACTS)
    except Unresolved as error:
        unavailable(error, enable="install Maven (mvn) with access to Maven Central")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The page's class."""
    page = (ROOT / "docs/request-reply.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```java\n(.*?)```", page, re.DOTALL)
    file = tmp_path / "Ask.java"
    file.write_text(code, encoding="utf-8")
    return file


async def test_each_question_has_its_own_answer_and_an_error_is_one(
    *,
    database: Database,
    channel: Channel,
    output_reader: OutputReader,
    start_worker: Callable[..., Worker],
    spring_jars: Path,
    source: Path,
) -> None:
    await load(database.writer, tiny_corpus())
    await start_worker(database.worker).until_ready()
    vector = unit_vectors(1, 1)[0]
    questions = [query(vector, profile="docs", similarity_threshold=0) for _ in range(EVENTS)]
    questions.insert(EVENTS // 2, query(vector, profile="unknown"))
    process = await asyncio.create_subprocess_exec(
        "java",
        *("-XX:TieredStopAtLevel=1", "-cp", f"{spring_jars}/*", str(source)),
        *(channel.bootstrap_servers, channel.input, channel.replies, str(PARTITION)),
        str(ROOT / "schemas/avro/released/retrieval_result.1.0.0.avsc"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(60):
            output, errors = await process.communicate(b"\n".join(map(as_json, questions)))
    finally:
        if process.returncode is None:
            process.kill()
            print(await process.communicate())

    assert process.returncode == 0, errors.decode()
    lines = output.decode().splitlines()
    assert lines[EVENTS // 2] == "unknown_profile", errors.decode()
    del lines[EVENTS // 2], questions[EVENTS // 2]
    assert [line.split(" ")[0] for line in lines] == [question["event_id"] for question in questions]
    assert all(line.partition(" ")[2] not in ("", "null") for line in lines)
    await output_reader.until(results=EVENTS, dead_letters=1, replies=EVENTS + 1)
    assert {record.partition for record in output_reader.replies} == {PARTITION}
