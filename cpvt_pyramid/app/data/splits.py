"""Splits by the names of files and folders."""

import re
from collections.abc import Sequence
from typing import NamedTuple, Optional

from .description import SPLITS

WORD = re.compile('[A-Z]+(?![a-z])|[A-Z]?[a-z]+')
SPLIT_WORDS = {
    'train': {'train', 'training', 'trainval'},
    'val': {'val', 'valid', 'validation'},
    'test': {'test', 'testing'},
}


class Splits(NamedTuple):
    """The indices of paths by what their names say they are for."""

    by_split: dict[str, list[int]]
    unnamed: list[int]  # their names say nothing


def divided_by_name(paths: Sequence[str]) -> Splits:
    """What files or folders are for by their names; if none is for training, those whose names say
    nothing are."""
    result = Splits({split: [] for split in SPLITS}, [])
    for index, path in enumerate(paths):
        split = split_of(path)
        (result.by_split[split] if split else result.unnamed).append(index)
    if not result.by_split['train']:
        result.by_split['train'] += result.unnamed
        result.unnamed.clear()
    return result


def split_of(path: str) -> Optional[str]:
    """What a path says it is for: its last part that has the word of a split, and of one only."""
    for part in reversed(path.split('/')):
        words = words_of(part)
        found = [split for split, names in SPLIT_WORDS.items() if words & names]
        if found:
            return found[0] if len(found) == 1 else None
    return None


def words_of(name: str) -> set[str]:
    """The words of a name, in small letters."""
    return {word.lower() for word in WORD.findall(name)}
