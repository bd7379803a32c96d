"""``python -m benchmarks.index``: recall, latency, size, build time and insert cost of several vector indexes.

Every index has a table of its own with the same rows, and nothing else: no policies, no other indexes, no triggers. So
the differences are the index's. The indexes take turns of a few queries each, so that a busy minute of the machine
counts for all of them. Build and search are also measured as the server's CPU time, which other processes disturb less.
"""

import argparse
import asyncio
import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import asyncpg
import numpy as np
import psutil
from pgvector.asyncpg import register_vector

from benchmarks import CRANFIELD
from streams.bench.world import Vectors, base, grow, noisy, questions, unit
from streams.embedded.postgres import THROW_AWAY, EmbeddedPostgres
from streams.terminal import echo

Connection = Any  # asyncpg's, whose type is generic only in its stubs

_DIMENSIONS: Final = 768
_K: Final = 15
_EF_SEARCH: Final = (100, 200, 300, 400)
_QUERIES: Final = 150
# Each index in turn searches this part of the queries.
_TURNS: Final = 9
_CLUSTER_SIZE: Final = 500
_CLUSTER_NOISE: Final = 0.3
_INSERT_NOISE: Final = 0.12
# Two rows whose distances differ by less may change places: the server calculates in float32.
_TIE: Final = 1e-6


@dataclass(frozen=True)
class Variant:
    """One definition of the index."""

    type: str
    m: int
    ef_construction: int

    @property
    def name(self) -> str:
        return f"{self.type} {self.m}/{self.ef_construction}"

    @property
    def table(self) -> str:
        return f"chunks_{self.type}_{self.m}_{self.ef_construction}"

    @property
    def expression(self) -> str:
        # Normalized first: a halfvec has no numbers above 65,504, and rounds small ones to zero.
        return "embedding" if self.type == "vector" else f"(l2_normalize(embedding)::halfvec({_DIMENSIONS}))"

    @property
    def create(self) -> str:
        return (
            f"CREATE INDEX ON {self.table} USING hnsw ({self.expression} {self.type}_cosine_ops)"
            f" WITH (m = {self.m}, ef_construction = {self.ef_construction})"
        )

    def search(self, rows: int) -> str:
        """The nearest of so many rows from the index by their exact distance, as the worker searches."""
        vector = "$1" if self.type == "vector" else f"l2_normalize($1::vector)::halfvec({_DIMENSIONS})"
        return (
            f"SELECT id FROM (SELECT id, embedding <=> $1 AS distance FROM {self.table}"  # noqa: S608  # constants
            f" ORDER BY {self.expression} <=> {vector} LIMIT {rows}) nearest"
            f" ORDER BY distance + 0, id LIMIT {_K}"
        )


VARIANTS: Final = (
    Variant("vector", 16, 64),  # pgvector's default
    Variant("vector", 32, 200),
    Variant("halfvec", 16, 200),
    Variant("halfvec", 16, 400),  # a new store's
    Variant("halfvec", 24, 400),
    Variant("halfvec", 32, 200),
    Variant("halfvec", 32, 400),
    Variant("halfvec", 64, 400),
)


@dataclass(frozen=True)
class DataSet:
    """Vectors of unit length, and queries."""

    name: str
    vectors: Vectors
    queries: Vectors

    def nearest(self) -> list[set[int]]:
        """Of each query, every row that is as near as the fifteenth nearest."""
        similarities = self.queries.astype(np.float64) @ self.vectors.astype(np.float64).T
        fifteenth = np.partition(similarities, -_K, axis=1)[:, -_K]
        return [
            set(np.flatnonzero(row >= least - _TIE).tolist())
            for row, least in zip(similarities, fifteenth, strict=True)
        ]


@dataclass
class Measured:
    """One index with one size of the candidate list."""

    ef_search: int
    recalls: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0

    def summary(self) -> dict[str, float]:
        p50, p95 = np.percentile(1000 * np.array(self.seconds), [50, 95])
        return {
            "ef_search": self.ef_search,
            "recall_at_15": float(np.mean(self.recalls)),
            "least_recall": float(np.min(self.recalls)),
            "p50_ms": float(p50),
            "p95_ms": float(p95),
            "cpu_ms": 1000 * self.cpu_seconds / len(self.seconds),
        }


@dataclass
class Index:
    """What one index costs."""

    variant: Variant
    build_seconds: float
    build_cpu_seconds: float
    megabytes: float
    insert_ms: float = 0.0
    searches: list[Measured] = field(default_factory=list)


def cranfield(chunks: int, seed: int) -> DataSet:
    """The collection as it is, with its own queries."""
    del seed
    of = base(CRANFIELD)
    return DataSet(of.name, of.vectors[:chunks], of.queries)


def grown(chunks: int, seed: int) -> DataSet:
    """Grown from the collection with noise, and asked, as in `make bench`."""
    world = grow(base(CRANFIELD), chunks, seed)
    asked = questions(world, "extraction", _QUERIES, seed)
    return DataSet(
        f"grown from {world.base.name}", world.vectors, np.array([question.vector for question in asked])
    )


def clusters(chunks: int, seed: int) -> DataSet:
    """Dense clusters of five hundred, far from each other: most links of a vector lead to its own cluster."""
    rng = np.random.default_rng([seed, 2])
    centres = unit(rng.normal(size=(max(1, chunks // _CLUSTER_SIZE), _DIMENSIONS)))

    def around(count: int) -> Vectors:
        return noisy(centres[rng.integers(0, len(centres), count)], _CLUSTER_NOISE, rng)

    return DataSet("synthetic clusters", around(chunks), around(_QUERIES))


_DATA_SETS: Final = {"cranfield": cranfield, "grown": grown, "clusters": clusters}


class Bench:
    """A server, and one data set after another."""

    def __init__(self, server: EmbeddedPostgres, arguments: argparse.Namespace) -> None:
        self._server = server
        self._arguments = arguments

    async def run(self, data: DataSet) -> tuple[list[Index], float]:
        """Every index; and what an insert costs without one, in milliseconds."""
        connection = await asyncpg.connect(self._server.dsn())
        try:
            return await self._run(connection, data)
        finally:
            await connection.close()

    async def _run(self, connection: Connection, data: DataSet) -> tuple[list[Index], float]:
        await connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        await register_vector(connection)
        await connection.execute(
            f"SET maintenance_work_mem = '{self._arguments.maintenance_work_mem}';"
            f"SET max_parallel_maintenance_workers = {self._arguments.parallel_workers};"
            "SET jit = off; SET hnsw.iterative_scan = off; SET enable_seqscan = off; SET enable_sort = on"
        )
        await self._load(connection, "bare", data.vectors)
        indexes = [await self._build(connection, variant, data) for variant in self._arguments.variants]
        await connection.execute("VACUUM ANALYZE")
        await self._search(connection, indexes, data)
        bare = await self._insert(connection, indexes, data)
        for name in ("bare", *(index.variant.table for index in indexes)):
            await connection.execute(f"DROP TABLE {name}")
        return indexes, bare

    async def _load(self, connection: Connection, name: str, vectors: Vectors) -> None:
        # As in schemas/postgres: vectors in the table itself, not out of line.
        await connection.execute(
            f"CREATE TABLE {name} (id int PRIMARY KEY, embedding vector({_DIMENSIONS}) STORAGE PLAIN)"
        )
        for first in range(0, len(vectors), 5000):
            await connection.copy_records_to_table(
                name, records=list(enumerate(vectors[first : first + 5000], start=first))
            )

    async def _build(self, connection: Connection, variant: Variant, data: DataSet) -> Index:
        await self._load(connection, variant.table, data.vectors)
        cpu, began = await self._cpu(connection, workers=True), perf_counter()
        await connection.execute(variant.create, timeout=None)
        seconds = perf_counter() - began
        cpu = await self._cpu(connection, workers=True) - cpu
        size = await connection.fetchval(
            "SELECT pg_relation_size(indexrelid) FROM pg_index"
            " WHERE indrelid = $1::text::regclass AND NOT indisprimary",
            variant.table,
        )
        return Index(variant, seconds, cpu, size / 1024**2)

    async def _search(self, connection: Connection, indexes: Sequence[Index], data: DataSet) -> None:
        nearest = data.nearest()
        statements = [
            await connection.prepare(index.variant.search(self._arguments.rows)) for index in indexes
        ]
        for index, statement in zip(indexes, statements, strict=True):
            plan = json.dumps(await statement.explain(data.queries[0]))
            if "hnsw" not in plan and "_idx" not in plan:
                raise RuntimeError(f"{index.variant.name}: the planner does not use the index")
            index.searches = [Measured(ef_search) for ef_search in _EF_SEARCH]
        for repetition in range(-1, self._arguments.rounds):  # the first is the warm-up
            for number, ef_search in enumerate(_EF_SEARCH):
                await connection.execute(f"SET hnsw.ef_search = {ef_search}")
                for first in range(_TURNS if repetition >= 0 else 1):
                    for index, statement in zip(indexes, statements, strict=True):
                        await self._turn(
                            connection,
                            statement,
                            index.searches[number] if repetition >= 0 else Measured(ef_search),
                            data.queries[first::_TURNS],
                            nearest[first::_TURNS],
                        )

    async def _turn(
        self,
        connection: Connection,
        statement: Any,
        measured: Measured,
        queries: Vectors,
        nearest: Sequence[set[int]],
    ) -> None:
        cpu = await self._cpu(connection)
        for query, best in zip(queries, nearest, strict=True):
            began = perf_counter()
            rows = await statement.fetch(query)
            measured.seconds.append(perf_counter() - began)
            measured.recalls.append(len(best.intersection(row[0] for row in rows)) / _K)
        measured.cpu_seconds += await self._cpu(connection) - cpu

    async def _insert(self, connection: Connection, indexes: Sequence[Index], data: DataSet) -> float:
        """Insert the same new rows into each table in turn, one by one."""
        rng = np.random.default_rng([self._arguments.seed, 3])
        count = self._arguments.inserts
        rows = noisy(data.vectors[rng.integers(0, len(data.vectors), count)], _INSERT_NOISE, rng)
        tables = ["bare", *(index.variant.table for index in indexes)]
        statements = [
            await connection.prepare(f"INSERT INTO {name} VALUES ($1, $2)")  # noqa: S608  # constants
            for name in tables
        ]
        seconds: list[list[float]] = [[] for _ in tables]
        for number, vector in enumerate(rows, start=len(data.vectors)):
            for statement, spent in zip(statements, seconds, strict=True):
                began = perf_counter()
                await statement.fetch(number, vector)
                spent.append(perf_counter() - began)
        bare, *medians = (1000 * float(np.median(spent)) for spent in seconds)
        for index, median in zip(indexes, medians, strict=True):
            index.insert_ms = median
        return bare

    async def _cpu(self, connection: Connection, *, workers: bool = False) -> float:
        """CPU seconds that the connection's server process has used; with the parallel workers that have ended."""
        used = psutil.Process(connection.get_server_pid()).cpu_times()
        seconds: float = used.user + used.system
        if workers:
            await asyncio.sleep(0.1)  # until the postmaster has noticed their end
            ended = psutil.Process(self._server.pid).cpu_times()
            seconds += ended.children_user + ended.children_system
        return seconds


def _show(data: DataSet, indexes: Sequence[Index], bare: float) -> None:
    """The table of docs/performance.md."""
    columns = [
        *("index", "`m`", "`ef_construction`", "size", "build", "insert"),
        *(f"`ef_search` {ef_search}" for ef_search in _EF_SEARCH),
    ]
    rows = [
        columns,
        ["---"] * len(columns),
        ["none", "", "", "", "", f"{bare:.1f} ms", *[""] * len(_EF_SEARCH)],
        *(
            [
                *(f"`{index.variant.type}`", str(index.variant.m), str(index.variant.ef_construction)),
                *(f"{index.megabytes:.0f} MB", f"{index.build_seconds:.0f} s", f"{index.insert_ms:.1f} ms"),
                *(_cell(each.summary()) for each in index.searches),
            ]
            for index in indexes
        ),
    ]
    echo(
        f"\n{data.name}: {len(data.vectors):,} vectors, {len(data.queries)} queries;"
        f" recall@{_K}, PostgreSQL's CPU time per search, median latency\n"
    )
    for row in rows:
        echo(f"| {' | '.join(row)} |")


def _cell(searched: dict[str, float]) -> str:
    return f"{searched['recall_at_15']:.3f}, {searched['cpu_ms']:.1f} ms, {searched['p50_ms']:.1f} ms"


def _record(data: DataSet, indexes: Sequence[Index], bare: float) -> dict[str, Any]:
    return {
        "data": data.name,
        "vectors": len(data.vectors),
        "queries": len(data.queries),
        "insert_without_index_ms": bare,
        "indexes": [
            {
                **asdict(index.variant),
                "megabytes": index.megabytes,
                "build_seconds": index.build_seconds,
                "build_cpu_seconds": index.build_cpu_seconds,
                "insert_ms": index.insert_ms,
                "searches": [measured.summary() for measured in index.searches],
            }
            for index in indexes
        ],
    }


def _variant(text: str) -> Variant:
    found = re.fullmatch(r"(vector|halfvec) (\d+)/(\d+)", text)
    if found is None:
        raise argparse.ArgumentTypeError("write type, m and ef_construction as in 'halfvec 16/400'")
    return Variant(found[1], int(found[2]), int(found[3]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.index", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--chunks", type=int, default=50_000, help="of the larger data sets (%(default)s)")
    parser.add_argument("--data", nargs="+", choices=_DATA_SETS, default=list(_DATA_SETS))
    parser.add_argument(
        "--variants",
        nargs="+",
        type=_variant,
        default=VARIANTS,
        help="such as 'halfvec 32/200'; by default those of docs/performance.md",
    )
    parser.add_argument("--rounds", type=int, default=2, help="how often each query runs (%(default)s)")
    parser.add_argument(
        "--rows", type=int, default=8 * _K, help="from the index for each query (%(default)s)"
    )
    parser.add_argument("--inserts", type=int, default=300, help="rows inserted one by one (%(default)s)")
    parser.add_argument("--maintenance-work-mem", default="1GB")
    parser.add_argument("--parallel-workers", type=int, default=1, help="of a build (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser


async def _main(arguments: argparse.Namespace) -> None:
    records = []
    # Everything fits into memory, as a store that is searched all day does.
    settings = {**THROW_AWAY, "shared_buffers": "3GB", "autovacuum": "off", "max_wal_size": "8GB"}
    with EmbeddedPostgres(settings=settings) as server:
        bench = Bench(server, arguments)
        version = await _version(server)
        echo(
            f"{version}, {os.cpu_count()} processors ({platform.machine()}), load {os.getloadavg()[0]:.1f},"
            f" seed {arguments.seed}; {arguments.rows} rows from the index, the {_K} nearest of them by exact distance"
        )
        for name in arguments.data:
            data = _DATA_SETS[name](arguments.chunks, arguments.seed)
            indexes, bare = await bench.run(data)
            _show(data, indexes, bare)
            records.append(_record(data, indexes, bare))
            if arguments.json:
                arguments.json.write_text(
                    json.dumps({"server": version, "data_sets": records}, indent=1) + "\n"
                )


async def _version(server: EmbeddedPostgres) -> str:
    connection = await asyncpg.connect(server.dsn())
    try:
        return str(
            await connection.fetchval(
                "SELECT 'PostgreSQL ' || current_setting('server_version') || ', pgvector ' || default_version"
                " FROM pg_available_extensions WHERE name = 'vector'"
            )
        )
    finally:
        await connection.close()


if __name__ == "__main__":
    asyncio.run(_main(_parser().parse_args()))
