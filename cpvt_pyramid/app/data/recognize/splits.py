"""Splits by the names of files and folders."""

import posixpath
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, Optional

from .words import KIND_WORDS, WORD

SPLIT_WORDS = {
    'train': {'train', 'training', 'trainval'},
    'val': {'val', 'valid', 'validation', 'dev', 'eval'},
    'test': {'test', 'testing'},
}
EVERY_SPLIT_WORD = set().union(*SPLIT_WORDS.values())
# Words that stand next to that of a split without changing what it says
NEUTRAL = KIND_WORDS | set(
    'instances coco set data dataset split json yolo voc obj object objects info all lvis '
    'left bit fine'.split()
)


class Splits(NamedTuple):
    """Paths by what their names say they are for."""

    by_split: dict[str, list[str]]
    unnamed: list[str]  # their names say nothing
    doubtful: list[str]  # names with a word of a split and others, or words of several


def splits_of(paths: Sequence[str]) -> Splits:
    """What files or folders are for, by the last part of each path that has the word of a split.

    A word next to it that not all such names share makes it doubtful: `crash test`, `site_dev`.
    """
    said: dict[str, tuple[set[str], set[str]]] = {}  # by path: splits, and other words
    for path in paths:
        for part in reversed(path.split('/')):
            words = {word.lower() for word in WORD.findall(without_data_ending(part))}
            if words & EVERY_SPLIT_WORD:
                splits = {s for s, names in SPLIT_WORDS.items() if words & names}
                rest = {word for word in words - EVERY_SPLIT_WORD - NEUTRAL if len(word) > 1}
                said[path] = splits, rest
                break
    rests = [rest for _, rest in said.values()]
    shared = set.intersection(*rests) if len(rests) > 1 else set()
    result = Splits(defaultdict(list), [], [])
    for path in paths:
        splits, rest = said.get(path, (set(), set()))
        is_only_training = len(said) == 1 and splits == {'train'}
        if not splits:
            result.unnamed.append(path)
        elif len(splits) > 1 or rest - shared and not is_only_training:
            result.doubtful.append(path)
        else:
            result.by_split[splits.pop()].append(path)
    return result


def split_of(path: str) -> Optional[str]:
    """What the name of a single path says it is for."""
    found = [*splits_of([path]).by_split]
    return found[0] if found else None


def without_data_ending(name: str) -> str:
    stem, ending = posixpath.splitext(name)
    return stem if ending.lower() in ('.json', '.txt', '.xml') else name
