"""Profiles: named retrieval parameters as data, and the parameters that apply to one event.

Belongs here: the data, its validation, and how an event's overrides combine with it. Does not belong here: where the
profiles file is, or how it is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from streams.core.errors import ModelMismatch, UnknownProfile
from streams.core.messages import QueryEmbedding

__all__ = ["BUILTIN_PROFILES", "Profile", "ProfileError", "RetrievalParams", "overlay", "resolve_params"]


class ProfileError(Exception):
    """A profile is malformed; the message names the key."""


class Profile(BaseModel):
    """A named set of retrieval rules.

    Attributes:
        k_default: number of passages if the event does not set k.
        k_min: lower bound to which an event's k is clamped.
        k_max: upper bound to which an event's k is clamped.
        order: ``similarity`` sorts the selection by score; ``interleaved`` keeps the order of selection.
        expand_parents: replace a problem by its parent.
        similarity_threshold: minimum cosine similarity, inclusive; None: no threshold.
        token_budget: maximum tokens of all passages together, including headers; None: no budget.
        overflow: ``stop`` ends the selection at the first passage that does not fit, ``skip`` skips that passage.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    k_default: int = Field(ge=1, le=1000)
    k_min: int = Field(ge=1, le=1000)
    k_max: int = Field(ge=1, le=1000)
    order: Literal["similarity", "interleaved"] = "similarity"
    expand_parents: bool = False
    similarity_threshold: float | None = Field(default=None, ge=0, le=1)
    token_budget: int | None = Field(default=None, ge=1)
    overflow: Literal["stop", "skip"] = "stop"

    @model_validator(mode="after")
    def _range(self) -> Self:
        if not self.k_min <= self.k_default <= self.k_max:
            raise ValueError("k_min <= k_default <= k_max is violated")
        return self


BUILTIN_PROFILES: Mapping[str, Profile] = {
    # Entity extraction reads many passages; their ranking matters little.
    "extraction": Profile(k_default=15, k_min=10, k_max=15),
    # A chat turn: whole problems, most relevant first from both arms, limited to what fits into a prompt.
    "chat": Profile(
        k_default=9,
        k_min=1,
        k_max=9,
        order="interleaved",
        expand_parents=True,
        token_budget=3500,
        overflow="stop",
    ),
    # A documentation bot should rather return nothing than something irrelevant.
    "docs": Profile(k_default=5, k_min=1, k_max=20, similarity_threshold=0.5),
    # Drafting quotes its sources, so only close matches are useful.
    "drafting": Profile(k_default=5, k_min=1, k_max=20, similarity_threshold=0.75),
}


@dataclass(frozen=True, slots=True)
class RetrievalParams:
    """The parameters of one event: its profile with the event's overrides applied."""

    name: str
    profile: Profile
    k_requested: int | None
    k: int
    similarity_threshold: float | None
    token_budget: int | None

    @property
    def k_clamped(self) -> bool:
        return self.k_requested is not None and self.k_requested != self.k


def resolve_params(
    query: QueryEmbedding,
    profiles: Mapping[str, Profile],
    default: str,
    *,
    embedding_model: str | None = None,
) -> RetrievalParams:
    """Apply the event's overrides to its profile.

    Args:
        query: the event.
        profiles: by name.
        default: the profile of events that name none.
        embedding_model: the store's. Events of another model are rejected. None accepts all.

    Raises:
        UnknownProfile: the event names a profile that does not exist.
        ModelMismatch: the event's embedding is of another model.
    """
    name = query.profile if query.profile is not None else default
    profile = profiles.get(name)
    if profile is None:
        raise UnknownProfile(
            "the event names a profile that this worker does not have; it has"
            f" {', '.join(profiles)} (ANABRANCH_PROFILES_FILE)"
        )
    if None not in (embedding_model, query.embedding_model) and query.embedding_model != embedding_model:
        raise ModelMismatch("the event's embedding_model is not the store's (ANABRANCH_EMBEDDING_MODEL)")
    k = profile.k_default if query.k is None else min(max(query.k, profile.k_min), profile.k_max)
    threshold = query.similarity_threshold
    budget = query.token_budget
    return RetrievalParams(
        name=name,
        profile=profile,
        k_requested=query.k,
        k=k,
        similarity_threshold=profile.similarity_threshold if threshold is None else threshold,
        token_budget=profile.token_budget if budget is None else budget,
    )


def overlay(builtin: Mapping[str, Profile], overrides: Mapping[str, Any]) -> dict[str, Profile]:
    """The built-in profiles overridden by a file's tables. A known profile keeps the keys that its table omits.

    Args:
        builtin: the profiles to start from.
        overrides: name → table of profile keys, as parsed from TOML.

    Raises:
        ProfileError: a table has an unknown key or an invalid value; the message names both.
    """
    profiles = dict(builtin)
    for name, table in overrides.items():
        if not isinstance(table, Mapping):
            raise ProfileError(f"{name}: a profile must be a table of keys")
        base = profiles[name].model_dump() if name in profiles else {}
        try:
            profiles[name] = Profile.model_validate({**base, **table})
        except ValidationError as error:
            fault = error.errors()[0]
            key = ".".join([name, *(str(part) for part in fault["loc"])])
            raise ProfileError(f"{key}: {fault['msg'].removeprefix('Value error, ')}") from None
    return profiles
