"""Embeds single texts: collects those of a few milliseconds into a batch, and finds which text makes a batch fail."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, Self

import numpy as np

from streams.core.embedding_errors import (
    EmbeddingError,
    EmptyText,
    ProviderMisconfigured,
    ProviderUnavailable,
    TextRejected,
    WrongDimension,
)
from streams.embedding.provider import Embedded, Provider, Vectors

__all__ = ["Embedder", "Embedding"]

# What every provider must embed: if it rejects this, the texts are not at fault.
_PROBE: Final = "What is the capital of France?"


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """A text's embedding.

    Attributes:
        vector: shape (dimensions,), float32, finite and not all zeros; of any length.
        truncated: whether only the text's beginning was embedded.
    """

    vector: Vectors
    truncated: bool


_Batch = list[tuple[str, asyncio.Future[Embedding]]]


class Embedder:
    """Embeds texts with a provider. An async context manager: entering it checks the provider.

    Args:
        provider: the provider; closed with the embedder.
        dimensions: what embeddings must have.
        shorten: cuts a text to a configured length before it is sent.
        batch_size: maximum number of texts in a batch.
        batch_wait_seconds: how long the first text of a batch waits for others.
    """

    def __init__(
        self,
        provider: Provider,
        *,
        dimensions: int,
        shorten: Callable[[str], str] = str,
        batch_size: int = 32,
        batch_wait_seconds: float = 0.005,
    ) -> None:
        self._provider = provider
        self._dimensions = dimensions
        self._requested: int | None = None
        self._shorten = shorten
        self._batch_size = batch_size
        self._batch_wait_seconds = batch_wait_seconds
        self._waiting: _Batch = []
        self._timer: asyncio.TimerHandle | None = None
        self._batches: dict[asyncio.Task[None], _Batch] = {}

    async def __aenter__(self) -> Self:
        """Check the provider.

        Raises:
            KeyRejected: the API key is wrong.
            WrongDimension: the model does not have the configured number of dimensions.
            ProviderMisconfigured: another setting is wrong.
            ProviderUnavailable: the provider cannot be reached, or fails.
        """
        try:
            await self.check()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what has not been embedded, and close the provider."""
        self._send_batch()
        tasks = list(self._batches)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._provider.close()

    async def check(self) -> None:
        """Check the provider with a test sentence.

        Raises:
            EmbeddingError: as when the embedder is entered.
        """
        try:
            own = (await self._provider.embed([_PROBE])).vectors.shape[1]
        except TextRejected as error:
            raise ProviderMisconfigured(
                f"{error}, also a test sentence: is the model's name right?"
            ) from None
        if own == self._dimensions:
            self._requested = None
            return
        # Only some models have a choice of dimensions; the others reject it, or ignore it.
        try:
            asked = (await self._provider.embed([_PROBE], dimensions=self._dimensions)).vectors.shape[1]
        except TextRejected:
            asked = own
        if asked != self._dimensions:
            raise WrongDimension(f"the model's embeddings have {own} dimensions, not {self._dimensions}")
        self._requested = self._dimensions

    async def embed(self, text: str) -> Embedding:
        """Embed a text.

        Raises:
            EmptyText: it is blank.
            TextRejected: the provider rejects it, though it accepts others.
            ProviderUnavailable: the provider cannot be reached, or fails; perhaps only because of this text.
            ProviderMisconfigured: settings are wrong.
        """
        if not text.strip():
            raise EmptyText("the text is empty or only white space")
        shortened = self._shorten(text)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Embedding] = loop.create_future()
        self._waiting.append((shortened, future))
        if len(self._waiting) >= self._batch_size:
            self._send_batch()
        elif self._timer is None:
            self._timer = loop.call_later(self._batch_wait_seconds, self._send_batch)
        embedding = await future
        return Embedding(embedding.vector, embedding.truncated or len(shortened) < len(text))

    def _send_batch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch = [(text, future) for text, future in self._waiting if not future.cancelled()]
        self._waiting.clear()
        if batch:
            task = asyncio.create_task(self._run_batch(batch))
            self._batches[task] = batch
            task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        for _, future in self._batches.pop(task):
            future.cancel()  # what a cancelled task has not answered

    async def _run_batch(self, batch: _Batch) -> None:
        outcomes: Sequence[Embedding | Exception]
        try:
            outcomes = await self._embed_batch([text for text, _ in batch])
        except Exception as error:  # noqa: BLE001  # a defect, which its callers report
            outcomes = [error] * len(batch)
        for (_, future), outcome in zip(batch, outcomes, strict=True):
            if future.done():  # cancelled meanwhile
                continue
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    async def _embed_batch(self, texts: Sequence[str]) -> Sequence[Embedding | EmbeddingError]:
        """One outcome for each text; a failure that may be due to one of them does not affect the others."""
        try:
            embedded = await self._provider.embed(texts, dimensions=self._requested)
        except EmbeddingError as error:
            may_be_due_to_one = isinstance(error, TextRejected) or (
                isinstance(error, ProviderUnavailable) and error.status == HTTPStatus.INTERNAL_SERVER_ERROR
            )
            if len(texts) == 1:
                return [await self._blame(error)]
            if may_be_due_to_one:
                alone = await asyncio.gather(*(self._embed_batch([text]) for text in texts))
                return [outcome for [outcome] in alone]
            return [error] * len(texts)
        return await self._outcomes(embedded)

    async def _outcomes(self, embedded: Embedded) -> Sequence[Embedding | EmbeddingError]:
        vectors = embedded.vectors
        if vectors.shape[1] != self._dimensions:
            wrong = WrongDimension(
                f"the model's embeddings have {vectors.shape[1]} dimensions now, not {self._dimensions}"
            )
            return [wrong] * len(vectors)
        usable = [bool(np.isfinite(vector).all() and vector.any()) for vector in vectors]
        return [
            Embedding(vector, truncated)
            if is_usable
            else await self._blame(TextRejected("the embedding is all zeros or not finite"))
            for vector, truncated, is_usable in zip(vectors, embedded.truncated, usable, strict=True)
        ]

    async def _blame(self, error: EmbeddingError) -> EmbeddingError:
        """The error itself, or if it blames a text and every text fails this way, one that blames the provider."""
        if not isinstance(error, TextRejected):
            return error
        try:
            probe = (await self._provider.embed([_PROBE], dimensions=self._requested)).vectors
        except TextRejected:
            return ProviderMisconfigured(f"{error}, also a test sentence: is the model's name right?")
        except EmbeddingError as other:
            return other
        if not np.isfinite(probe).all() or not probe.any():
            return ProviderMisconfigured(f"{error}, also that of a test sentence")
        return error
