"""Direct mode: runs the worker's retrieval in this process, as the worker's role."""

from collections.abc import Mapping
from time import perf_counter
from types import TracebackType
from typing import Self

from streams.core.errors import TerminalError, TransientError
from streams.core.messages import QueryEmbedding
from streams.core.profiles import Profile, resolve_params
from streams.evaluation.query_runner import Answered, DeadLettered, EvaluationError, Outcome, Unanswered
from streams.retrieval import Tokenizer, retrieve
from streams.store.postgres import PostgresStore
from streams.store.preflight import inspect

__all__ = ["DirectStore"]

_CLOSE_SECONDS = 5.0


class DirectStore:
    """Queries a store as a worker does. An async context manager.

    Args:
        store: the store, not opened yet.
        principals_setting: the name of the setting that the row-level policies read.
        dimensions: of the embeddings.
        profiles: the profiles by name.
        default_profile: the profile of events that do not name one.
        embedding_model: the store's model; events with another model are rejected. None: accept any.
        count_tokens: counts the tokens of a text.
    """

    def __init__(
        self,
        store: PostgresStore,
        *,
        principals_setting: str,
        dimensions: int,
        profiles: Mapping[str, Profile],
        default_profile: str,
        embedding_model: str | None,
        count_tokens: Tokenizer,
    ) -> None:
        self._store = store
        self._setting = principals_setting
        self._dimensions = dimensions
        self._profiles = profiles
        self._default_profile = default_profile
        self._embedding_model = embedding_model
        self._count_tokens = count_tokens

    async def __aenter__(self) -> Self:
        """Raise EvaluationError if a worker would not run, because results with such a role would be wrong."""
        await self._store.open()
        try:
            await self._check_role()
            await self._store.warm_up()
        except TransientError as error:
            await self._store.close(timeout_seconds=_CLOSE_SECONDS)
            raise EvaluationError(f"PostgreSQL: {error.code}: {error}") from None
        except BaseException:
            await self._store.close(timeout_seconds=_CLOSE_SECONDS)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._store.close(timeout_seconds=_CLOSE_SECONDS)

    async def _check_role(self) -> None:
        findings = await self._store.inspect(
            lambda connection: inspect(
                connection, principals_setting=self._setting, dimensions=self._dimensions
            )
        )
        for finding in findings:
            if finding.level in {"refused", "unready"}:
                raise EvaluationError(f"{finding.detail}; remedy: {finding.remedy}")

    async def ask(self, event: QueryEmbedding) -> Outcome:
        """Retrieve once; an error of the store means no answer, and is not retried."""
        started = perf_counter()
        try:
            params = resolve_params(
                event, self._profiles, self._default_profile, embedding_model=self._embedding_model
            )
            retrieved = await retrieve(event, params, self._store, self._count_tokens, started=started)
        except TerminalError as error:
            return DeadLettered(error.code, str(error))
        except TransientError as error:
            return Unanswered(f"{error.code}: {error}")
        return Answered(retrieved.result, (perf_counter() - started) * 1000)
