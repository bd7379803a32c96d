"""Profiles as data, and the params that one event ends up with."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.core.errors import UnknownProfile
from streams.core.messages import QueryEmbedding
from streams.core.profiles import BUILTIN_PROFILES, Profile, ProfileError, overlay, resolve_params

EVENT: dict[str, Any] = {
    "schema_version": "1.0.0",
    "event_id": "6f1c2f5e-8f0b-4d6a-9d43-0a7c1f2e3b4d",
    "occurred_at": "2025-06-01T12:34:56Z",
    "principals": ["user:42"],
    "embedding": [0.5] * 768,
}


def query(**fields: Any) -> QueryEmbedding:
    return QueryEmbedding.parse(EVENT | fields)


def test_the_shipped_profiles_are_the_specifications() -> None:
    columns = (
        "k_default",
        "k_min",
        "k_max",
        "order",
        "expand_parents",
        "similarity_threshold",
        "token_budget",
        "overflow",
    )
    table = {
        name: tuple(getattr(profile, column) for column in columns)
        for name, profile in BUILTIN_PROFILES.items()
    }
    assert table == {
        "extraction": (15, 10, 15, "similarity", False, None, None, "stop"),
        "chat": (9, 1, 9, "interleaved", True, None, 3500, "stop"),
        "docs": (5, 1, 20, "similarity", False, 0.5, None, "stop"),
        "drafting": (5, 1, 20, "similarity", False, 0.75, None, "stop"),
    }


@pytest.mark.parametrize("name", BUILTIN_PROFILES)
def test_an_event_without_options_gets_its_profile_s_values(name: str) -> None:
    params = resolve_params(query(profile=name), BUILTIN_PROFILES, "extraction")
    profile = BUILTIN_PROFILES[name]
    assert (params.name, params.profile) == (name, profile)
    assert (params.k_requested, params.k, params.k_clamped) == (None, profile.k_default, False)
    assert params.similarity_threshold == profile.similarity_threshold
    assert params.token_budget == profile.token_budget


def test_an_event_without_profile_gets_the_default_one() -> None:
    assert resolve_params(query(), BUILTIN_PROFILES, "docs").name == "docs"
    assert resolve_params(query(profile=None), BUILTIN_PROFILES, "docs").name == "docs"


@given(st.integers(-(2**40), 2**40), st.sampled_from(sorted(BUILTIN_PROFILES)))
def test_k_is_clamped_and_never_an_error(k: int, name: str) -> None:
    params = resolve_params(query(profile=name, k=k), BUILTIN_PROFILES, "extraction")
    profile = params.profile
    assert profile.k_min <= params.k <= profile.k_max
    if profile.k_min <= k <= profile.k_max:
        assert (params.k, params.k_clamped) == (k, False)
    else:
        assert params.k in {profile.k_min, profile.k_max}
        assert params.k_clamped
    # What was asked is told as it was asked, up to int32.
    assert params.k_requested == max(-(2**31), min(2**31 - 1, k))


@pytest.mark.parametrize(("k", "effective"), [(9, 10), (10, 10), (15, 15), (16, 15), (0, 10), (-1, 10)])
def test_k_at_the_bounds(k: int, effective: int) -> None:
    assert resolve_params(query(k=k), BUILTIN_PROFILES, "extraction").k == effective


def test_an_event_s_own_options_override_its_profile() -> None:
    params = resolve_params(
        query(profile="chat", similarity_threshold=0.25, token_budget=7), BUILTIN_PROFILES, "docs"
    )
    assert (params.similarity_threshold, params.token_budget) == (0.25, 7)
    # Zero is a threshold, not the absence of one.
    assert (
        resolve_params(
            query(profile="docs", similarity_threshold=0), BUILTIN_PROFILES, "docs"
        ).similarity_threshold
        == 0
    )


@pytest.mark.parametrize("name", ["canary-91", "", "Extraction", "extraction "])
def test_an_unknown_profile_is_refused_without_quoting_it(name: str) -> None:
    with pytest.raises(UnknownProfile) as caught:
        resolve_params(query(profile=name), BUILTIN_PROFILES, "extraction")
    assert "canary" not in str(caught.value)


def test_an_unknown_profile_is_refused_with_the_names_of_the_known_ones() -> None:
    with pytest.raises(UnknownProfile, match=r"; it has extraction, chat, docs, drafting, mine \("):
        resolve_params(
            query(profile="main"),
            overlay(BUILTIN_PROFILES, {"mine": BUILTIN_PROFILES["docs"].model_dump()}),
            "docs",
        )


def test_a_known_name_keeps_what_the_table_leaves_out() -> None:
    profiles = overlay(BUILTIN_PROFILES, {"chat": {"token_budget": 900, "overflow": "skip"}})
    assert profiles["chat"] == BUILTIN_PROFILES["chat"].model_copy(
        update={"token_budget": 900, "overflow": "skip"}
    )
    assert {name: profiles[name] for name in BUILTIN_PROFILES if name != "chat"} == {
        name: profile for name, profile in BUILTIN_PROFILES.items() if name != "chat"
    }
    assert BUILTIN_PROFILES["chat"].token_budget == 3500  # the shipped ones stay as they are


def test_a_new_name_is_added() -> None:
    profiles = overlay(
        BUILTIN_PROFILES, {"review": {"k_default": 3, "k_min": 1, "k_max": 4, "similarity_threshold": 1}}
    )
    assert profiles["review"] == Profile(k_default=3, k_min=1, k_max=4, similarity_threshold=1.0)
    assert set(profiles) == {*BUILTIN_PROFILES, "review"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"chat": 7}, "chat: a profile must be a table of keys"),
        ({"chat": {"k": 7}}, "chat.k: "),
        ({"chat": {"k_max": "9"}}, "chat.k_max: "),
        ({"chat": {"k_max": 9.0}}, "chat.k_max: "),
        ({"chat": {"expand_parents": 1}}, "chat.expand_parents: "),
        ({"chat": {"order": "random"}}, "chat.order: "),
        ({"chat": {"overflow": "drop"}}, "chat.overflow: "),
        ({"chat": {"k_min": 0}}, "chat.k_min: "),
        ({"chat": {"k_max": 1001}}, "chat.k_max: "),
        ({"chat": {"token_budget": 0}}, "chat.token_budget: "),
        ({"docs": {"similarity_threshold": 1.01}}, "docs.similarity_threshold: "),
        ({"docs": {"similarity_threshold": float("nan")}}, "docs.similarity_threshold: "),
        ({"extraction": {"k_max": 12}}, "extraction: k_min <= k_default <= k_max is violated"),
        ({"new": {"k_default": 3, "k_min": 1}}, "new.k_max: "),
    ],
)
def test_a_malformed_profile_is_refused_by_key(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError) as caught:
        overlay(BUILTIN_PROFILES, overrides)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_profile_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        BUILTIN_PROFILES["chat"].k_max = 100
