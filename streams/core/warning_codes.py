"""Codes of the warnings that a result can carry."""

from enum import StrEnum

__all__ = ["WarningCode"]


class WarningCode(StrEnum):
    """A warning's stable code, as in the result's `warnings`."""

    K_CLAMPED = "k_clamped"
    FIRST_PASSAGE_EXCEEDS_BUDGET = "first_passage_exceeds_budget"
    PARENT_MISSING = "parent_missing"
    SCAN_TRUNCATED = "scan_truncated"
    STORE_VALUE_INVALID = "store_value_invalid"
