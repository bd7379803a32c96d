"""``python -m tests.evaluate``: everything from scratch, and exit code 1 where a bound is missed."""

import argparse
import asyncio
import os
import platform
import sys
from time import perf_counter
from typing import Final

import asyncpg
from rich.console import Console

from benchmarks.unguarded import create_unguarded_functions
from streams.core.messages import Filters, MetadataRange
from streams.embedded.postgres import THROW_AWAY, EmbeddedPostgres
from tests.conftest import SETTING, Database, PostgresServer
from tests.evaluate.access import measure_access
from tests.evaluate.cranfield import load_cranfield, measure_cranfield
from tests.evaluate.outcome import Outcome
from tests.evaluate.plans import combinations_of, measure_plans
from tests.evaluate.recall import measure_recall
from tests.evaluate.worlds import (
    CRANFIELD,
    EVERYBODY,
    SIZE,
    Base,
    World,
    base,
    day_bound,
    grow,
    kinds,
    load,
    prefix,
    rank_bound,
    session_id,
    topic_id,
)
from tests.integration.connections import opened_store

# Both worlds fit into memory, as a store that is searched all day does.
_SERVER: Final = {**THROW_AWAY, "shared_buffers": "1GB", "autovacuum": "off"}
_WIDTH: Final = 118
_PARTS: Final = ("recall", "access", "plans", "cranfield")


class Evaluation:
    """A server, its databases, and the parts one after another."""

    def __init__(self, server: PostgresServer, console: Console, seed: int, parts: list[str]) -> None:
        self._server = server
        self._console = console
        self._seed = seed
        self._parts = parts
        self._missed: list[str] = []
        self.known: list[str] = []

    async def run(self) -> list[str]:
        """Every part that was asked for; returns the bounds that were missed."""
        of = base(self._seed)
        self._header(of)
        if "cranfield" in self._parts:
            await self._cranfield(of)
        worlds = {*self._parts} & {"recall", "access", "plans"}
        for correlated in (False, True) if worlds else ():
            await self._world(grow(of, self._seed, correlated=correlated))
        return self._missed

    async def _cranfield(self, of: Base) -> None:
        if not CRANFIELD.is_dir():
            self._console.print(
                "\nCranfield is not beside the checkout: its table is left out, its bounds are not held."
            )
            return
        database = self._server.database()
        await load_cranfield(of, database)
        async with opened_store(database.worker, warm=True) as store:
            self._show(await measure_cranfield(of, store))

    async def _world(self, world: World) -> None:
        database = self._server.database()
        began = perf_counter()
        await load(world, database)
        sets, sizes = await _counted(database)
        self._console.print(
            f"\n[dim]{world.name} world: {SIZE:,} chunks of {len(world.document_ids):,} documents, {sets:,} sets of"
            f" readers, {sizes}; loaded and indexed in {perf_counter() - began:.0f} s[/]"
        )
        async with opened_store(database.worker, warm=True) as store:
            if "recall" in self._parts:
                self._show(await measure_recall(world, database, store, self._seed))
            if "access" in self._parts:
                await create_unguarded_functions(database.admin, "unguarded", principals_setting=SETTING)
                async with opened_store(self._server.login("unguarded", database), warm=True) as bare:
                    self._show(await measure_access(world, store, bare, self._seed, sets=sets))
            if "plans" in self._parts and not world.correlated:
                asked = list(
                    combinations_of(
                        session=session_id("10"),
                        topic=topic_id("10"),
                        section="10",
                        document_type="10",
                        prefix=prefix("10"),
                        metadata=Filters(
                            metadata={"class": "10"},
                            metadata_contains={"tags": ("10",)},
                            metadata_any={"kind": kinds("10")},
                            metadata_range={
                                "rank": MetadataRange(lt=rank_bound("10")),
                                "day": MetadataRange(before=day_bound("10")),
                            },
                        ),
                    )
                )
                self._show(await measure_plans(store, [EVERYBODY], world.queries[0], asked))
        self._server.drop(database)

    def _header(self, of: Base) -> None:
        load_average = f", load {os.getloadavg()[0]:.1f} at the start" if hasattr(os, "getloadavg") else ""
        self._console.print(
            f"[bold]Anabranch, evaluated[/] with seed {self._seed}, on {os.cpu_count()} processors"
            f" ({platform.machine()}){load_average}, Python {platform.python_version()}\nVectors of 768: {of.name}"
        )

    def _show(self, outcome: Outcome) -> None:
        self._console.print(f"\n[bold]{outcome.title}[/]")
        for each in outcome.shown:
            self._console.print(each)
        self._missed += outcome.missed
        self.known += outcome.known


async def _counted(database: Database) -> tuple[int, str]:
    """Sets of readers, and how large chunks and vectors' index are."""
    connection = await asyncpg.connect(database.admin)
    try:
        sets = await connection.fetchval("SELECT count(*) FROM access_sets")
        sizes = await connection.fetchval(
            "SELECT format('chunks %s, HNSW %s', pg_size_pretty(pg_table_size('document_chunks')),"
            " pg_size_pretty(pg_relation_size('document_chunks_embedding_halfvec')))"
        )
    finally:
        await connection.close()
    return sets, sizes


async def _prepare(embedded: EmbeddedPostgres) -> str:
    """The role that shows what searches cost without access control; returns the versions."""
    connection = await asyncpg.connect(embedded.dsn())
    try:
        await connection.execute(
            "CREATE ROLE unguarded LOGIN PASSWORD 'test' BYPASSRLS IN ROLE anabranch_reader"
        )
        return str(
            await connection.fetchval(
                "SELECT format('PostgreSQL %s, pgvector %s', current_setting('server_version'), default_version)"
                " FROM pg_available_extensions WHERE name = 'vector'"
            )
        )
    finally:
        await connection.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="make evaluate", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "parts", nargs="*", default=list(_PARTS), help=f"of {', '.join(_PARTS)}; all by default"
    )
    options = parser.parse_args()
    if unknown := {*options.parts} - {*_PARTS}:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    began = perf_counter()
    with EmbeddedPostgres(settings=_SERVER) as embedded:
        server = PostgresServer(embedded)
        console.print(asyncio.run(_prepare(embedded)))
        evaluation = Evaluation(server, console, options.seed, options.parts)
        missed = asyncio.run(evaluation.run())
    console.print(f"\n[dim]{perf_counter() - began:.0f} s[/]")
    for line in evaluation.known:
        console.print(f"[yellow]![/] known: {line}", soft_wrap=True)
    for line in missed:
        console.print(f"[red]✗[/] {line}", soft_wrap=True)
    if not missed:
        console.print("[green]✓[/] every bound holds")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
