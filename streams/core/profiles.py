"""Profiles: named retrieval rules as data, and the rules that one event ends up with.

What may live here: the data, its validation, and how an event's own wishes combine with it. Not: where a profiles
file is, or how it is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from streams.core.errors import UnknownProfile
from streams.core.messages import QueryEmbedding

__all__ = ["BUILTIN_PROFILES", "Profile", "ProfileError", "RetrievalParams", "overlay", "resolve_params"]


class ProfileError(Exception):
    """A profile is malformed; the message names the key."""


class Profile(BaseModel):
    """A named set of retrieval rules.

    Attributes:
        k_default: passages returned where the event does not say.
        k_min: an event's smaller k becomes this.
        k_max: an event's larger k becomes this.
        order: ``similarity`` sorts the selection by score; ``interleaved`` keeps the order of selection.
        expand_parents: a problem is replaced by its parent.
        similarity_threshold: least cosine similarity, inclusive; None: no threshold.
        token_budget: tokens of all passages together, headers included; None: no budget.
        overflow: ``stop`` ends the selection at the first passage that does not fit, ``skip`` passes it over.
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
            raise ValueError("k_min <= k_default <= k_max must hold")
        return self


BUILTIN_PROFILES: Mapping[str, Profile] = {
    # Entity extraction reads much and ranks little.
    "extraction": Profile(k_default=15, k_min=10, k_max=15),
    # A chat turn: whole problems, most relevant first from both arms, within what a prompt can spare.
    "chat": Profile(
        k_default=9,
        k_min=1,
        k_max=9,
        order="interleaved",
        expand_parents=True,
        token_budget=3500,
        overflow="stop",
    ),
    # A documentation bot had better say nothing than something beside the point.
    "docs": Profile(k_default=5, k_min=1, k_max=20, similarity_threshold=0.5),
    # Drafting quotes its sources: only near matches will do.
    "drafting": Profile(k_default=5, k_min=1, k_max=20, similarity_threshold=0.75),
}


@dataclass(frozen=True, slots=True)
class RetrievalParams:
    """What holds for one event: its profile, overridden by its own wishes."""

    name: str
    profile: Profile
    k_requested: int | None
    k: int
    similarity_threshold: float | None
    token_budget: int | None

    @property
    def k_clamped(self) -> bool:
        return self.k_requested is not None and self.k_requested != self.k


def resolve_params(query: QueryEmbedding, profiles: Mapping[str, Profile], default: str) -> RetrievalParams:
    """Combine the event's wishes with its profile.

    Raises:
        UnknownProfile: the event names a profile that is not there.
    """
    name = query.profile if query.profile is not None else default
    profile = profiles.get(name)
    if profile is None:
        raise UnknownProfile("the event names a profile that this worker does not have")
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


def overlay(shipped: Mapping[str, Profile], changes: Mapping[str, Any]) -> dict[str, Profile]:
    """The shipped profiles with a file's tables laid over them: a known name keeps what the table leaves out.

    Args:
        shipped: the profiles to start from.
        changes: name → table of a profile's keys, as parsed from TOML.

    Raises:
        ProfileError: a table has an unknown key or a value outside its domain; the message names both.
    """
    profiles = dict(shipped)
    for name, table in changes.items():
        if not isinstance(table, Mapping):
            raise ProfileError(f"{name}: a profile is a table of keys")
        base = profiles[name].model_dump() if name in profiles else {}
        try:
            profiles[name] = Profile.model_validate({**base, **table})
        except ValidationError as error:
            fault = error.errors()[0]
            key = ".".join([name, *(str(part) for part in fault["loc"])])
            raise ProfileError(f"{key}: {fault['msg'].removeprefix('Value error, ')}") from None
    return profiles
