"""`anabranch ingest`: writes documents to the store, or deletes them; a progress bar, and a summary."""

import os
import select
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from io import BufferedReader, RawIOBase
from typing import Any, BinaryIO, Final, Literal

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from streams import ingest as ingestion
from streams.configured import make_embedder
from streams.core.documents import DocumentError
from streams.ingest import OpenEmbedder, Validated
from streams.settings import EmbeddingSettings, IngestionSettings, load_embedding
from streams.store.ingestion import Deleted, DocumentStore, Written, open_documents
from streams.terminal import Console, Text, echo, json_text

__all__ = ["Mode", "Outcome", "as_json", "run", "show"]

Mode = Literal["write", "delete", "validate"]

_BUFFER_SIZE: Final = 2**20


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run did.

    Attributes:
        rejected: lines for which nothing was written.
        truncated: chunks of which only the beginning was embedded.
    """

    counts: Written | Deleted | Validated
    rejected: int
    truncated: int


class _Report:
    """Prints rejected lines above the bar, which shows the share of the file that is done."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar = bar
        self._task = task
        self._lines = 0
        self.rejections = 0
        self.truncations = 0

    def progress(self, lines: int, size: int) -> None:
        self._lines += lines
        self._bar.update(self._task, advance=size, lines=self._lines)

    def rejected(self, number: int, error: DocumentError) -> None:
        self.rejections += 1
        self._print(f"line {number}: {error.code}: {error}")

    def truncated(self, number: int, chunk: int) -> None:
        self.truncations += 1
        self._print(f"line {number}: warning: only the beginning of chunks[{chunk}] was embedded")

    def _print(self, line: str) -> None:
        if self._bar.disable:
            echo(line, err=True)
        else:  # only the bar's console knows which line of the terminal the bar is on
            self._bar.console.print(Text(line), soft_wrap=True)


async def run(
    settings: IngestionSettings, file: BinaryIO, *, size: int | None, mode: Mode, embed_again: bool
) -> Outcome:
    """Ingest, delete or only validate.

    Args:
        settings: for the store, and whether there is a provider of embeddings.
        file: the input, of which nothing has been read.
        size: of the input in bytes, if known.
        mode: what to do with it.
        embed_again: embed also what the store already has an embedding for.

    Raises:
        SettingsError: a setting is missing or invalid.
        IngestionError: the store is not ready.
        EmbeddingError: the provider fails, or is misconfigured.
        OSError, asyncpg.PostgresError, asyncpg.InterfaceError: the store fails.
    """
    embedding = load_embedding() if settings.anabranch_embedding_provider is not None else None
    async with open_documents(
        settings.dsn, statement_cache_size=settings.anabranch_statement_cache_size
    ) as store:
        with _bar(mode, size) as report, _lines(file) as lines:
            counts: Written | Deleted | Validated
            if mode == "delete":
                counts = await ingestion.delete(lines, store, report)
            elif mode == "validate":
                counts = await ingestion.validate(lines, store, report)
            else:
                counts = await ingestion.ingest(
                    lines, store, report, open_embedder=_opener(embedding, store), embed_again=embed_again
                )
    return Outcome(counts, report.rejections, report.truncations)


def _opener(settings: EmbeddingSettings | None, store: DocumentStore) -> OpenEmbedder | None:
    if settings is None:
        return None
    of_store = settings.model_copy(update={"anabranch_embedding_dimensions": store.dimensions})
    return partial(make_embedder, of_store, input_type="search_document")


class _Input(RawIOBase):
    """A file that ends when it is stopped, even while a thread waits for a pipe."""

    def __init__(self, file: int) -> None:
        super().__init__()
        self._file = file
        self._stopped, self._stop = os.pipe()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        ready, _, _ = select.select([self._file, self._stopped], [], [])
        return 0 if self._stopped in ready else os.readv(self._file, [buffer])

    def stop(self) -> None:
        os.write(self._stop, b"\0")

    def close(self) -> None:
        if not self.closed:
            os.close(self._stop)
            os.close(self._stopped)
        super().close()


@contextmanager
def _lines(file: BinaryIO) -> Iterator[Iterable[bytes]]:
    # Python waits for its threads before it exits. The input closes itself once no thread uses it.
    source = _Input(file.fileno())
    try:
        yield BufferedReader(source, _BUFFER_SIZE)
    finally:
        source.stop()


@contextmanager
def _bar(mode: Mode, size: int | None) -> Iterator[_Report]:
    # On standard error, and only if it is a terminal.
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[lines]} lines"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield _Report(bar, bar.add_task(_DOING[mode], total=size, lines=0))


_DOING: Final = {"write": "ingesting", "delete": "deleting", "validate": "validating"}


def as_json(outcome: Outcome) -> str:
    """The counts as one JSON object."""
    return json_text(
        asdict(outcome.counts) | {"lines_rejected": outcome.rejected, "chunks_truncated": outcome.truncated}
    )


def show(outcome: Outcome) -> None:
    """Print the counts."""
    for line in _summary(outcome):
        echo(line)


def _summary(outcome: Outcome) -> Iterable[str]:
    counts = outcome.counts
    if isinstance(counts, Written):
        yield (
            f"documents: {counts.documents_new} new, {counts.documents_changed} changed,"
            f" {counts.documents_unchanged} unchanged"
        )
        yield (
            f"chunks: {counts.chunks_new} new, {counts.chunks_changed} changed,"
            f" {counts.chunks_unchanged} unchanged, {counts.chunks_deleted} deleted"
        )
        if counts.unreadable:
            yield f"nobody can read {counts.unreadable} of these documents: they have no grants"
    elif isinstance(counts, Deleted):
        yield f"documents: {counts.documents_deleted} deleted, {counts.documents_missing} not in the store"
        yield f"chunks: {counts.chunks_deleted} deleted"
    else:
        yield f"valid documents: {counts.documents}, with {counts.chunks} chunks, {counts.chunks_to_embed} to embed"
    if outcome.truncated:
        yield f"only the beginning of {outcome.truncated} chunks was embedded: they are too long for the model"
    if outcome.rejected:
        yield f"rejected lines: {outcome.rejected}"
