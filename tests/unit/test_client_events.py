"""What a client makes of a call's arguments: valid events in the oldest version, or an error with a stable code."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any, get_type_hints
from uuid import UUID, uuid4

import numpy as np
import pytest

from streams.client import ConversationMessage, Filters, InvalidEvent, QueryOptions
from streams.client.events import make_event
from streams.core.messages import QueryEmbedding, QueryText

NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
VECTOR = [0.5] * 768


def make(**arguments: Any) -> QueryEmbedding | QueryText:
    given = {"principals": ["user:1"], "embedding": None, "text": None, "dimensions": 768, "now": NOW}
    options = {name: arguments.pop(name) for name in list(arguments) if name not in given}
    return make_event(**{**given, **arguments}, options=QueryOptions(**options))  # type: ignore[typeddict-item]  # also wrong ones


@pytest.mark.parametrize(
    "embedding",
    [
        VECTOR,
        tuple(VECTOR),
        np.full(768, 0.5),
        np.full(768, 0.5, dtype=np.float32),
        np.full(768, 0.5, dtype=np.float16),
    ],
)
def test_an_embedding_may_be_a_sequence_or_an_array(embedding: Any) -> None:
    event = make(embedding=embedding, embedding_model="m", k=5, filters=None)
    assert isinstance(event, QueryEmbedding)
    assert list(event.embedding) == VECTOR
    assert (event.schema_version, event.embedding_model, event.k, event.occurred_at) == ("1.0.0", "m", 5, NOW)


def test_the_version_is_the_oldest_that_can_express_the_event() -> None:
    assert make(embedding=VECTOR, explain=True).schema_version == "1.1.0"
    assert make(embedding=VECTOR, filters={"metadata": {"year": "2020"}}).schema_version == "1.0.0"
    ranged = make(embedding=VECTOR, filters={"metadata_range": {"year": {"gte": 2020}}})
    assert ranged.schema_version == "1.1.0"
    assert ranged.filters is not None
    assert make(embedding=VECTOR, filters=ranged.filters).filters == ranged.filters
    assert make(embedding=[1.0, 2.0], dimensions=None).schema_version == "1.1.0"


def test_a_text_has_its_own_options() -> None:
    session, topic, event_id = uuid4(), uuid4(), uuid4()
    event = make(
        text="and why?",
        session_id=session,
        topic_id=str(topic),
        topic_title="Open-channel flow",
        conversation=[{"role": "user", "text": "Hello"}, ConversationMessage(role="assistant", text="Hi")],
        event_id=event_id,
        expires_at=NOW + timedelta(seconds=3),
        key=b"k",
        headers=[("traceparent", b"00")],
    )
    assert isinstance(event, QueryText)
    assert (event.event_id, event.session_id, event.topic_id) == (event_id, session, topic)
    assert event.conversation is not None
    assert [message.text for message in event.conversation] == ["Hello", "Hi"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"embedding": [0.5] * 767}, "dimension_mismatch"),
        ({"embedding": np.ones((1, 768))}, "contract_violation"),
        ({"embedding": [0.0] * 768}, "zero_embedding"),
        ({"embedding": np.full(768, np.nan)}, "non_finite_embedding"),
        ({"embedding": np.full(768, 1e300)}, "non_finite_embedding"),
        ({"embedding": ["0.5"] * 768}, "contract_violation"),
        ({"embedding": VECTOR, "principals": []}, "contract_violation"),
        ({"embedding": VECTOR, "principals": "group:staff"}, "contract_violation"),
        ({"embedding": VECTOR, "topic_id": UUID(int=1)}, "topic_without_session"),
        ({"embedding": VECTOR, "k": "10"}, "contract_violation"),
        ({"embedding": VECTOR, "expires_at": datetime(2026, 1, 1)}, "contract_violation"),  # noqa: DTZ001  # the point
        ({"embedding": VECTOR, "profile": "nul\0"}, "contract_violation"),
        ({"text": ""}, "contract_violation"),
        ({"text": "t", "topic_id": UUID(int=1)}, "topic_without_session"),
        ({"text": "t", "conversation": [{"role": "user"}]}, "contract_violation"),
    ],
)
def test_an_invalid_event_has_a_dead_letter_s_code(arguments: dict[str, Any], code: str) -> None:
    with pytest.raises(InvalidEvent) as caught:
        make(**arguments)
    assert caught.value.code == code
    assert caught.value.reason
    assert str(caught.value) == f"{code}: {caught.value.reason}"
    assert "group:staff" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either embedding or text"),
        ({"embedding": VECTOR, "text": "t"}, "either embedding or text"),
        ({"embedding": VECTOR, "sesion_id": uuid4()}, "unknown option: sesion_id"),
        ({"embedding": VECTOR, "filters": {"sectoin": "1"}}, "unknown filter: sectoin"),
        ({"embedding": VECTOR, "topic_title": "t"}, "topic_title: only with text"),
        ({"text": "t", "embedding_model": "m"}, "embedding_model: only with embedding"),
    ],
)
def test_a_mistake_in_the_program_is_a_type_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        make(**arguments)


def test_every_field_of_an_event_is_an_option() -> None:
    """Or an argument, or what only the embedding stage knows."""
    fields = QueryEmbedding.model_fields.keys() | QueryText.model_fields.keys()
    others = {"schema_version", "principals", "embedding", "text", "upstream_warnings"}
    assert get_type_hints(QueryOptions).keys() == fields - others | {"key", "headers"}
    documented = re.findall(r"^        (\w+): ", QueryOptions.__doc__ or "", re.MULTILINE)
    assert documented == list(get_type_hints(QueryOptions))


def test_filters_of_both_forms_are_the_same() -> None:
    own = Filters(section="1", metadata_any={"year": ("2020", "2021")})
    assert make(embedding=VECTOR, filters=own).filters == own
    assert (
        make(embedding=VECTOR, filters={"section": "1", "metadata_any": {"year": ["2020", "2021"]}}).filters
        == own
    )
