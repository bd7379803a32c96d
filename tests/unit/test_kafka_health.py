"""What a worker says of Kafka when the clients report errors: once, and what mends it."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from streams.broker.connection import UnusableCertificate
from streams.broker.diagnosis import Diagnosis
from streams.worker.kafka_health import KafkaHealth

DOWN = Diagnosis("kafka:9092", refused=False, detail="it cannot be reached", remedy="look")
WRONG_PASSWORD = Diagnosis(
    "kafka:9092", refused=True, detail="the server rejects the login", remedy="mend it"
)


class Kafka:
    """Says what it is told to; the last answer for ever."""

    def __init__(self, *answers: Diagnosis | Exception | None) -> None:
        self._answers = list(answers)
        self.asked = 0

    async def diagnose(self) -> Diagnosis | None:
        self.asked += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@asynccontextmanager
async def watched(kafka: Kafka) -> AsyncIterator[KafkaHealth]:
    health = KafkaHealth(kafka.diagnose, interval_seconds=0.01)
    watching = asyncio.create_task(health.watch())
    await asyncio.sleep(0)
    try:
        yield health
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


async def until_asked(kafka: Kafka, times: int) -> None:
    for _ in range(2000):
        if kafka.asked >= times:
            break
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.005)  # and what was answered is taken in


def reason(health: KafkaHealth) -> str | None:
    """Read again each time, for the type checker too."""
    return health.reason


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [
        (record.levelname, record.message) for record in caplog.records if record.name.startswith("streams")
    ]


async def test_nobody_is_asked_while_all_is_well() -> None:
    kafka = Kafka(None)
    async with watched(kafka) as health:
        await asyncio.sleep(0.05)
        assert (kafka.asked, health.reason) == (0, None)


async def test_a_refusal_is_reported_once_and_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    kafka = Kafka(WRONG_PASSWORD, WRONG_PASSWORD, WRONG_PASSWORD, DOWN, WRONG_PASSWORD, None)
    async with watched(kafka) as health:
        # Faust's consumer runs in a thread of its own.
        await asyncio.to_thread(logging.getLogger("aiokafka.client").error, "Unable connect to node")
        await until_asked(kafka, 1)
        assert reason(health) == str(WRONG_PASSWORD)
        await until_asked(kafka, 6)
        assert reason(health) is None
        await asyncio.sleep(0.05)
        assert kafka.asked == 6  # and no more
    assert logged(caplog) == [("ERROR", str(WRONG_PASSWORD)), ("INFO", "Kafka connection restored")]


async def test_errors_by_the_second_are_one_question() -> None:
    kafka = Kafka(None)
    health = KafkaHealth(kafka.diagnose, interval_seconds=3600)
    watching = asyncio.create_task(health.watch())
    for _ in range(20):
        health.report_error()
        await asyncio.sleep(0.001)
    watching.cancel()
    assert kafka.asked == 1


async def test_a_broker_that_is_down_makes_unready_and_is_left_for_others_to_report(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kafka = Kafka(DOWN, DOWN, None)
    async with watched(kafka) as health:
        health.report_error()
        await until_asked(kafka, 1)
        assert reason(health) == str(DOWN)
        await until_asked(kafka, 3)
        assert reason(health) is None
    assert logged(caplog) == []


async def test_a_broker_that_was_down_at_the_start_is_probed_until_it_is_up() -> None:
    kafka = Kafka(DOWN, None)
    health = KafkaHealth(kafka.diagnose, interval_seconds=0.01)
    health.report_unreachable(str(DOWN))
    assert reason(health) == str(DOWN)
    watching = asyncio.create_task(health.watch())
    await until_asked(kafka, 2)
    watching.cancel()
    assert reason(health) is None


async def test_a_certificate_that_was_taken_away_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    kafka = Kafka(UnusableCertificate("KAFKA_SSL_CAFILE cannot be read"))
    async with watched(kafka) as health:
        health.report_error()
        await until_asked(kafka, 2)
        assert health.reason == "KAFKA_SSL_CAFILE cannot be read"
    assert logged(caplog) == [("ERROR", "KAFKA_SSL_CAFILE cannot be read")]


async def test_nothing_is_left_behind() -> None:
    before = list(logging.getLogger("aiokafka").handlers)
    async with watched(Kafka(None)):
        pass
    assert logging.getLogger("aiokafka").handlers == before
