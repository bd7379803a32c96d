"""No secret gets out, in whatever form something may have quoted, escaped or encoded it."""

import base64
import json
from collections.abc import Iterable
from urllib.parse import quote

__all__ = ["assert_silent"]


def _forms(secret: str) -> set[str]:
    raw = secret.encode()
    return {
        secret,
        quote(secret),
        quote(secret, safe=""),
        repr(secret)[1:-1],
        json.dumps(secret)[1:-1],
        base64.b64encode(raw).decode(),
        raw.hex(),
    }


def assert_silent(secrets: Iterable[str], *texts: str) -> None:
    """No secret is in any of the texts, and no trace, which might show more of them another day."""
    for text in texts:
        assert "Traceback" not in text, text
        for secret in secrets:
            assert [form for form in _forms(secret) if form in text] == []
