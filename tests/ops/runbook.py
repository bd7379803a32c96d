"""Which alerts the runbook lists for a fault."""

import re
from functools import cache
from pathlib import Path
from typing import Final

__all__ = ["alerts_of"]

_FILE: Final = Path(__file__).parents[2] / "k8s/observability/RUNBOOK.md"
_ROW: Final = re.compile(r"^\| (?P<fault>[^|]+) \| (?P<alerts>[^|]+) \| [^|]+ \|$", re.MULTILINE)


@cache
def _rows() -> dict[str, frozenset[str]]:
    _, _, table = _FILE.read_text(encoding="utf-8").partition("| fault | alerts |")
    table, _, _ = table.partition("\n\n")
    return {row["fault"]: frozenset(re.findall(r"\b[A-Z]\w+", row["alerts"])) for row in _ROW.finditer(table)}


def alerts_of(fault: str) -> frozenset[str]:
    """Names without prefix. A fault that the runbook does not list is an error."""
    return _rows()[fault]
