"""Phrases that prose, messages and comments do not use; the comments say what to write instead."""

from typing import Final

#: Regular expressions, matched without regard to case in text whose lines are joined by single spaces.
PHRASES: Final = (
    # Everywhere
    r"\baskers?\b",  # caller, requesting principals
    r"\bwho asks\b",  # caller, requesting principals
    r"\bin work\b",  # in flight, processed concurrently
    r"\bmend(?:s|ed|ing)?\b",  # fix, repair
    r"\bput(?:s|ting)?(?: \S+){0,3} aside\b",  # dead-letter
    r"\bnobody foresaw\b",  # unexpected
    r"\bunforeseen\b",  # unexpected
    r"\btold\b",  # reported, logged
    r"\bfor ever\b",  # indefinitely
    r"\banew\b",  # again
    r"\bsigns? of life\b",  # ping
    r"\bclocks\b",  # timeouts
    r"\bwishes\b",  # overrides, options
    r"\bgone\b",  # missing, deleted
    r"\b_?MOST_",  # _MAX_…
    r"\bshipped\b",  # built in, BUILTIN_PROFILES
    r"\bto (?:its|their) disadvantage\b",  # known limitations
    r"(?<!\bthere )\b(?:is|are|was|were) no (?!longer\b|more\b)",  # is not a …
    r"\b(?:has|have) not (?:\d|an? |any )",  # does not have …
    r"\b(?:is|are) to be repeated\b",  # retry
    # Sentences
    r"\bcomponent that is not zero\b",  # embedding is all zeros
    r"\bwhat (?:is|are) no\b",  # contains a non-string value
    r"\blets? us in\b",  # Kafka connection restored
    r"\btrying on\b",  # retrying
    r"(?<!\banyone )\bwho(?:ever)? (?:may|can) (?:write|read) th(?:e|is)\b",  # anyone who can …
    r"\b(?:accepted|published) (?:are|is)\b",  # the worker accepts …, the worker publishes …
    r"\bend as a deadlock\b",  # may deadlock
    r"\bcount a gap out\b",  # enumerate every offset in the gap
)
