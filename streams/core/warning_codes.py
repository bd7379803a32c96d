"""Codes of the warnings that a result can carry."""

from enum import StrEnum

__all__ = ["WarningCode"]


class WarningCode(StrEnum):
    """A warning's stable code, as in the result's `warnings`, which also has the event's `upstream_warnings`."""

    K_CLAMPED = "k_clamped"
    FIRST_PASSAGE_EXCEEDS_BUDGET = "first_passage_exceeds_budget"
    PARENT_MISSING = "parent_missing"
    SCAN_TRUNCATED = "scan_truncated"
    STORE_VALUE_INVALID = "store_value_invalid"
    EXPLANATION_UNAVAILABLE = "explanation_unavailable"
    REPLY_HEADERS_INVALID = "reply_headers_invalid"
    REPLY_TOPIC_NOT_ALLOWED = "reply_topic_not_allowed"
    REPLY_TOPIC_MISSING = "reply_topic_missing"
    REPLY_PARTITION_MISSING = "reply_partition_missing"
    REPLY_NOT_AUTHORIZED = "reply_not_authorized"
    REPLY_TOO_LARGE = "reply_too_large"
    REPLY_REJECTED = "reply_rejected"
    REPLY_EXPIRED = "reply_expired"
