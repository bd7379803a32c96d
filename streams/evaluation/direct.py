"""Straight to the store: the worker's own retrieval in this process, as the worker's role."""

from collections.abc import Mapping
from time import perf_counter
from types import TracebackType
from typing import Self

from streams.core.errors import ModelMismatch, TerminalError, TransientError
from streams.core.messages import QueryEmbedding
from streams.core.profiles import Profile, resolve_params
from streams.evaluation.query_runner import Answered, DeadLettered, EvaluationError, Outcome, Unanswered
from streams.retrieval import Tokenizer, retrieve
from streams.store.postgres import PostgresStore
from streams.store.preflight import inspect

__all__ = ["DirectStore"]

_CLOSE_SECONDS = 5.0


class DirectStore:
    """A store, asked as a worker asks it. An async context manager.

    Args:
        store: not opened yet.
        principals_setting: the name of the setting that the row-level policies read.
        profiles: by name.
        default_profile: of events that name none.
        embedding_model: the store's; events of another model are refused. None: any.
        count_tokens: tokens of a text.
    """

    def __init__(
        self,
        store: PostgresStore,
        *,
        principals_setting: str,
        profiles: Mapping[str, Profile],
        default_profile: str,
        embedding_model: str | None,
        count_tokens: Tokenizer,
    ) -> None:
        self._store = store
        self._setting = principals_setting
        self._profiles = profiles
        self._default_profile = default_profile
        self._embedding_model = embedding_model
        self._count_tokens = count_tokens

    async def __aenter__(self) -> Self:
        """Raises EvaluationError where a worker would not run: what such a role finds is nobody's answer."""
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
            lambda connection: inspect(connection, principals_setting=self._setting)
        )
        for finding in findings:
            if finding.level in {"refused", "unready"}:
                raise EvaluationError(f"{finding.detail}; remedy: {finding.remedy}")

    async def ask(self, event: QueryEmbedding) -> Outcome:
        """Retrieve once; a fault of the store is no answer, and not tried again."""
        asked = perf_counter()
        try:
            rules = resolve_params(event, self._profiles, self._default_profile)
            if None not in (self._embedding_model, event.embedding_model) and (
                event.embedding_model != self._embedding_model
            ):
                raise ModelMismatch("the event was embedded by another model than the store's")
            retrieved = await retrieve(event, rules, self._store, self._count_tokens, started=asked)
        except TerminalError as error:
            return DeadLettered(error.code, str(error))
        except TransientError as error:
            return Unanswered(f"{error.code}: {error}")
        return Answered(retrieved.result, (perf_counter() - asked) * 1000)
