"""Values as Grafana writes them."""

import math
from collections.abc import Sequence

__all__ = ["formatted"]


def formatted(value: float, unit: str, decimals: int | None = None) -> str:
    """A value as Grafana writes it in a unit."""
    if math.isinf(value):
        return "∞"
    size, name = _scaled(value, 1000, ("", "K", "Mil", "Bil"))
    text = f"{_number(size, decimals)} {name}".strip()
    match unit:
        case "percentunit":
            text = f"{_number(100 * value, decimals)}%"
        case "s":
            text = _time(value, decimals)
        case "bytes" | "Bps":
            size, name = _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
            text = f"{_number(size, decimals)} {name}" + ("/s" if unit == "Bps" else "")
        case "locale":
            text = f"{value:,.0f}"
        case "cps":
            text = f"{_number(value, decimals)}/s"
    return text


def _time(seconds: float, decimals: int | None) -> str:
    if seconds and abs(seconds) < 0.001:
        return f"{_number(1e6 * seconds, decimals)} µs"
    if seconds and abs(seconds) < 1:
        return f"{_number(1000 * seconds, decimals)} ms"
    for limit, length, name in (
        (60, 1, "s"),
        (3600, 60, "min"),
        (86_400, 3600, "hour"),
        (math.inf, 86_400, "day"),
    ):
        if abs(seconds) < limit:
            return f"{_number(seconds / length, decimals)} {name}"
    raise AssertionError(seconds)


def _scaled(value: float, base: int, names: Sequence[str]) -> tuple[float, str]:
    for name in names[:-1]:
        if abs(value) < base:
            return value, name
        value /= base
    return value, names[-1]


def _number(value: float, decimals: int | None) -> str:
    if decimals is not None:
        return f"{value:.{decimals}f}".removesuffix("." + "0" * decimals) if decimals else f"{value:.0f}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
