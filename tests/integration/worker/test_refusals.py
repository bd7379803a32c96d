"""A worker that must not or cannot start says why in one line, and ends.

Once, on the embedded broker: what Kafka says has no part in it. What Kafka refuses is in ``security/``.
"""

import socket
from collections.abc import Callable

import pytest

from tests.conftest import Database
from tests.integration.corpora import unit_vectors
from tests.integration.harness import Channel, OutputReader, Worker, as_json, query

pytestmark = [
    pytest.mark.usefixtures("channel"),
    pytest.mark.parametrize("broker", ["embedded"], indirect=True),
]

NOWHERE = "postgresql://worker:hunter2@127.0.0.1:1/nowhere"


@pytest.mark.parametrize(
    ("dsn", "settings", "named"),
    [
        pytest.param(None, {}, "DATABASE_CONNECTION_STRING", id="no connection string"),
        pytest.param("", {}, "DATABASE_CONNECTION_STRING", id="an empty connection string"),
        pytest.param(NOWHERE, {"ANABRANCH_CONCURENCY": "8"}, "ANABRANCH_CONCURENCY", id="a misspelt setting"),
        pytest.param(NOWHERE, {"ANABRANCH_CONCURRENCY": "many"}, "ANABRANCH_CONCURRENCY", id="no number"),
        pytest.param(
            NOWHERE, {"ANABRANCH_DEFAULT_PROFILE": "x"}, "ANABRANCH_DEFAULT_PROFILE", id="no profile"
        ),
        pytest.param(
            NOWHERE, {"ANABRANCH_SCHEMA_PATH": "/nowhere"}, "ANABRANCH_SCHEMA_PATH", id="no schemas"
        ),
        pytest.param(
            NOWHERE,
            {"ANABRANCH_EMBEDDING_DIMENSIONS": "1024"},
            "ANABRANCH_RESULT_CONTRACT",
            id="dimensions that the results' contract cannot express",
        ),
    ],
)
async def test_settings(
    dsn: str | None, settings: dict[str, str], named: str, start_worker: Callable[..., Worker]
) -> None:
    worker = start_worker(dsn, **settings)
    assert await worker.ended(seconds=20) not in (0, None)
    assert len(worker.log.splitlines()) == 1, worker.log
    assert named in worker.log
    assert "hunter2" not in worker.log


async def test_a_port_that_is_taken(start_worker: Callable[..., Worker]) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        worker = start_worker(NOWHERE, ANABRANCH_WEB_PORT=str(other.getsockname()[1]))
        assert await worker.ended(seconds=20) not in (0, None)
    assert len(worker.log.splitlines()) == 1, worker.log
    assert "ANABRANCH_WEB_PORT" in worker.log
    assert "in use; set it to another port" in worker.log


async def test_a_role_that_row_level_security_does_not_hold(
    database: Database, channel: Channel, output_reader: OutputReader, start_worker: Callable[..., Worker]
) -> None:
    await channel.send(as_json(query(unit_vectors(1, 1)[0])))
    for dsn in (database.admin, database.owner):
        worker = start_worker(dsn)
        assert await worker.ended(seconds=30) != 0
        assert len(worker.log.splitlines()) == 1, worker.log
        assert "role" in worker.log
        assert "correct horse" not in worker.log
    assert (output_reader.results, output_reader.dead_letters) == ([], [])


async def test_a_store_that_is_not_there_is_waited_for(start_worker: Callable[..., Worker]) -> None:
    worker = start_worker(NOWHERE)
    status = await worker.until_ready(ready=False)
    assert status < 30
    assert worker.is_live()
    assert "hunter2" not in worker.log
    code, _ = await worker.terminate()
    assert code == 0
