"""Names that a user may have meant."""

from collections.abc import Collection
from difflib import get_close_matches

MOST = 3  # names in a message


def similar_names(name: str, known: Collection[str]) -> list[str]:
    """Those that a shortened or misspelled name may mean, the nearest first. Case does not
    count."""
    name = name.lower()
    longer = [other for other in known if name and other.lower().startswith(f'{name}_')]
    if longer:
        return longer[:MOST]
    spelled = {other.lower(): other for other in known}
    return [spelled[near] for near in get_close_matches(name, spelled, n=MOST, cutoff=0.7)]


def did_you_mean(name: str, known: Collection[str]) -> str:
    """The end of a message about an unknown name; '' if it is like none."""
    similar = similar_names(name, known)
    return f'; did you mean {" or ".join(similar)}?' if similar else ''
