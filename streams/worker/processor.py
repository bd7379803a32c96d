"""What a worker does with an event: decode, retrieve, encode, publish.

Does not belong here: retries and dead letters, which `streams.worker.event_processor` has, Faust, SQL.
"""

from collections.abc import Callable, Mapping
from time import perf_counter

from streams.core.errors import SearchTimeout, StoreUnavailable, TransientError
from streams.core.headers import result_headers
from streams.core.messages import QueryEmbedding, RetrievalResult
from streams.core.profiles import Profile, RetrievalParams, resolve_params
from streams.core.replies import ReplyRefused
from streams.core.warning_codes import WarningCode
from streams.retrieval import Retrieved, Store, Tokenizer, retrieve
from streams.telemetry.metrics import OTHER_WARNING, Metrics
from streams.wire import Codec
from streams.worker.delivery import InterruptibleWaits
from streams.worker.dependency_health import DependencyHealth
from streams.worker.event_processor import (
    AttemptTracker,
    EventProcessor,
    InputRecord,
    OutagePolicy,
    Publish,
    refuse_expired,
)
from streams.worker.replies import Replies

__all__ = ["Processor"]

_OWN_WARNINGS = frozenset(WarningCode)

_Decoded = tuple[QueryEmbedding, RetrievalParams]


class Processor(EventProcessor[_Decoded]):
    """Answers query events.

    Args:
        publish: writes a record to a topic; returns when the broker has acknowledged it.
        publish_dead_letter: the same, with compression.
        reply_only: results that are sent as replies do not go to the output topic.
        embedding_model: the store's model; events with another model are rejected. None: accept any.
        waits: for waiting until the next attempt, or for the store.
        result_contract: minor version of the results' contract.
        on_answer: called when the broker has acknowledged a result.
    """

    dependency = "the store"
    failure = "the search timed out"
    unavailable_code = StoreUnavailable.code
    dependency_stage = "search"

    def __init__(
        self,
        *,
        codec: Codec,
        store: Store,
        health: DependencyHealth,
        count_tokens: Tokenizer,
        publish: Publish,
        publish_dead_letter: Publish,
        replies: Replies,
        reply_only: bool,
        metrics: Metrics,
        profiles: Mapping[str, Profile],
        default_profile: str,
        embedding_model: str | None,
        output_topic: str,
        dead_letter_topic: str,
        outage: OutagePolicy,
        waits: InterruptibleWaits,
        result_contract: str,
        on_answer: Callable[[Retrieved], None] = lambda _: None,
    ) -> None:
        super().__init__(
            health=health,
            publish_dead_letter=publish_dead_letter,
            replies=replies,
            metrics=metrics,
            dead_letter_topic=dead_letter_topic,
            outage=outage,
            waits=waits,
        )
        self._codec = codec
        self._store = store
        self._count_tokens = count_tokens
        self._publish = publish
        self._reply_only = reply_only
        self._metrics = metrics
        self._profiles = profiles
        self._default_profile = default_profile
        self._embedding_model = embedding_model
        self._output_topic = output_topic
        self._result_contract = result_contract
        self._on_answer = on_answer

    async def _answer(self, record: InputRecord, value: bytes, tracker: AttemptTracker[_Decoded]) -> None:
        metrics = self._metrics
        if tracker.decoded is None:
            clock = perf_counter()
            query = await self._decode(self._codec.decode_query, value)
            tracker.event_id, tracker.expires_at = query.event_id, query.expires_at
            tracker.decoded = query, self._resolve_params(query)
            metrics.stage("decode").observe(perf_counter() - clock)
        query, params = tracker.decoded

        with self._waits.pause():
            await self._health.wait_admitted()
        refuse_expired(query.expires_at)  # waiting may have taken long
        retrieved = await retrieve(
            query,
            params,
            self._store,
            self._count_tokens,
            started=record.read_at,
            on_stage=tracker.enter,
            contract=self._result_contract,
        )
        self._succeeded()
        metrics.stage("search").observe(retrieved.search_seconds)
        metrics.stage("assemble").observe(retrieved.assemble_seconds)
        for scope, seconds in retrieved.arm_seconds.items():
            metrics.search(scope).observe(seconds)

        tracker.enter("encode")
        clock = perf_counter()
        payload = self._codec.encode_result(retrieved.result)
        metrics.stage("encode").observe(perf_counter() - clock)

        tracker.enter("publish")
        clock = perf_counter()
        result = await self._publish_result(record, retrieved.result, payload, tracker)
        metrics.stage("publish").observe(perf_counter() - clock)
        self._count_answer(query, result, record)
        self._on_answer(retrieved)

    async def _publish_result(
        self,
        record: InputRecord,
        result: RetrievalResult,
        payload: bytes,
        tracker: AttemptTracker[_Decoded],
    ) -> RetrievalResult:
        """Send the result to the caller, if there is one, and to the output topic; returns the latter's result."""
        # The reply first: somebody waits for it.
        if tracker.reply_due:
            try:
                tracker.replied = await self._replies.answer(
                    record.key, payload, record.headers, expires_at=tracker.expires_at
                )
            except ReplyRefused as refused:
                tracker.reply_refused = refused.code
        if tracker.reply_refused is not None:
            result = result.with_warning(tracker.reply_refused.value)
            payload = self._codec.encode_result(result)
        if not (tracker.replied and self._reply_only):
            await self._publish(self._output_topic, record.key, payload, result_headers(record.headers))
        return result

    def _may_be_at_fault(self, fault: TransientError) -> bool:
        return isinstance(fault, SearchTimeout)

    def _resolve_params(self, query: QueryEmbedding) -> RetrievalParams:
        """Check what the contract cannot: this worker's profiles, its model, and the time.

        Raises:
            UnknownProfile, ModelMismatch, Expired: if the respective check fails.
        """
        params = resolve_params(
            query, self._profiles, self._default_profile, embedding_model=self._embedding_model
        )
        refuse_expired(query.expires_at)
        return params

    def _count_answer(self, query: QueryEmbedding, result: RetrievalResult, record: InputRecord) -> None:
        metrics = self._metrics
        metrics.outcome("answered").inc()
        duration, passages, tokens = metrics.of_profile(result.profile)
        duration.observe(perf_counter() - record.read_at)
        self._observe_age(record, query.occurred_at)
        for code in result.warnings:
            metrics.warnings.labels(code if code in _OWN_WARNINGS else OTHER_WARNING).inc()
        passages.observe(result.k_returned)
        tokens.observe(result.tokens_used)
