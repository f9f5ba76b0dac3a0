"""Numbers in words a person can read: durations and moments. Pure."""

from __future__ import annotations

from datetime import UTC, datetime

_UNITS = ((86_400, "day"), (3600, "hour"), (60, "minute"), (1, "second"))


def duration_in_words(seconds: int) -> str:
    """86400 -> "24 hours", 600 -> "10 minutes", 5400 -> "90 minutes": the largest unit that says it exactly;
    days only from two on, since "24 hours" is clearer than "1 day".
    """
    for size, unit in _UNITS:
        if seconds % size == 0 and seconds >= (2 * size if unit == "day" else size):
            return f"{seconds // size} {unit}{'' if seconds == size else 's'}"
    return f"{seconds} seconds"


def about_in_words(seconds: int) -> str:
    """A rough duration for a reader: 200 -> "3 min", 7300 -> "2 h"."""
    if seconds < 60:
        return f"{max(0, seconds)} s"
    if seconds < 3600:
        return f"{seconds // 60} min"
    if seconds < 2 * 86_400:
        return f"{seconds // 3600} h"
    return f"{seconds // 86_400} days"


def moment_in_words(at: int) -> str:
    """Unix seconds -> "2026-11-30 14:07:05 UTC"."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
