"""Splits by the names of files and folders."""

import re
from collections.abc import Sequence
from typing import NamedTuple, Optional

from .description import SPLITS
from .layout import Undecided

WORD = re.compile('[A-Z]+(?![a-z])|[A-Z]?[a-z]+')
SPLIT_WORDS = {
    'train': {'train', 'training', 'trainval'},
    'val': {'val', 'valid', 'validation', 'dev', 'eval'},
    'test': {'test', 'testing'},
}
EVERY_SPLIT_WORD = set().union(*SPLIT_WORDS.values())
# Words that stand next to that of a split without changing what it says
NEUTRAL = set(
    'images image imgs img photos pictures rgb sat jpg jpeg png masks mask labels label seg gt '
    'annotations annotation annot ann instances objects info coco yolo voc lvis json xml txt data '
    'dataset set split left bit fine'.split()
)


class Splits(NamedTuple):
    """The indices of paths by what their names say they are for."""

    by_split: dict[str, list[int]]
    unnamed: list[int]  # their names say nothing


def divided_by_name(paths: Sequence[str]) -> Splits:
    """What files or folders are for, by the last part of each path that has the word of a split; if
    none has that of training, those without a word are for training.

    Raises:
        Undecided: a name has words of several splits, or others that not all such names share:
            `crash test`, `site_dev`.
    """
    said: dict[str, tuple[set[str], set[str]]] = {}  # by path: splits, and other words
    for path in paths:
        for part in reversed(path.split('/')):
            words = words_of(part)
            if words & EVERY_SPLIT_WORD:
                splits = {s for s, names in SPLIT_WORDS.items() if words & names}
                rest = {word for word in words - EVERY_SPLIT_WORD - NEUTRAL if len(word) > 1}
                said[path] = splits, rest
                break
    rests = [rest for _, rest in said.values()]
    shared = set.intersection(*rests) if len(rests) > 1 else set()
    result = Splits({split: [] for split in SPLITS}, [])
    for index, path in enumerate(paths):
        splits, rest = said.get(path, (set(), set()))
        is_only_training = len(said) == 1 and splits == {'train'}
        if len(splits) > 1 or rest - shared and not is_only_training:
            raise Undecided(f'{path} may be for training, validation or tests')
        if splits:
            result.by_split[next(iter(splits))].append(index)
        else:
            result.unnamed.append(index)
    if not result.by_split['train']:
        result.by_split['train'] += result.unnamed
        result.unnamed.clear()
    return result


def words_of(name: str) -> set[str]:
    """The words of a name, in small letters."""
    return {word.lower() for word in WORD.findall(name)}


def split_of(path: str) -> Optional[str]:
    """What the name of a single path says it is for."""
    for part in reversed(path.split('/')):
        found = [s for s, names in SPLIT_WORDS.items() if words_of(part) & names]
        if found:
            return found[0] if len(found) == 1 else None
    return None
