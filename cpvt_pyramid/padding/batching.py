"""Batches in which no image is padded by another.

A model pads each image to multiples of its stride, which depends on the image alone. In a batch of
images whose padded sizes are equal, nothing else is padding, so that each image's results are those
that it has alone, whatever the model. All programs of this package form their batches here.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

Count = TypeVar('Count', int, 'Tensor')
Item = TypeVar('Item')
Result = TypeVar('Result')

WAITING = 64


def ceil_div(a: Count, b: int) -> Count:
    """a / b, rounded up."""
    return (a + b - 1) // b


def padded_size(size: Sequence[int], multiple: int) -> tuple[int, int]:
    """Height and width of an image after padding to multiples, both in pixels.

    Examples:
        >>> padded_size((480, 627), 32)
        (480, 640)
    """
    height, width = (ceil_div(side, multiple) * multiple for side in size)
    return height, width


def map_in_batches(
    function: Callable[[list[Item]], Iterable[Result]],
    items: Iterable[Item],
    key: Callable[[Item], Hashable],
    batch_size: int,
    waiting: float = WAITING,
    weight: Callable[[Item], float] = lambda item: 1,
) -> Iterator[Result]:
    """Call a function with batches of items that have one key; yields results in order of items.

    Args:
        function: takes a list of items, and returns a result for each of them.
        items: read as they are needed.
        key: items of one batch have equal keys, such as the padded sizes of images.
        batch_size: items in a full batch.
        waiting: the largest number of items that are held, including those whose results wait for
            an earlier item. When it is reached, the batch of the earliest item runs before it is
            full, unless the items held are fewer than a batch.
        weight: as how many items one counts for `waiting`, such as one that needs more memory.

    Examples:
        >>> words = ['one', 'three', 'two', 'seven', 'six']
        >>> list(map_in_batches(lambda batch: ['+'.join(batch)] * len(batch), words, len, 2))
        ['one+two', 'three+seven', 'one+two', 'three+seven', 'six']
    """
    groups: defaultdict[Hashable, list[tuple[int, Item]]] = defaultdict(list)
    results: dict[int, Result] = {}
    first_held = 0  # index of the earliest item whose result has not been yielded
    keys: dict[int, Hashable] = {}
    weights: dict[int, float] = {}  # of the items that are held

    def run(group_key: Hashable) -> None:
        group = groups.pop(group_key)
        found = list(function([item for _, item in group]))
        if len(found) != len(group):
            raise ValueError(f'a batch of {len(group)} needs as many results, got {len(found)}')
        for (index, _), result in zip(group, found):
            results[index] = result

    def ready() -> Iterator[Result]:
        nonlocal first_held
        while first_held in results:
            yield results.pop(first_held)
            del keys[first_held], weights[first_held]
            first_held += 1

    for index, item in enumerate(items):
        keys[index] = key(item)
        weights[index] = weight(item)
        groups[keys[index]].append((index, item))
        if len(groups[keys[index]]) == batch_size:
            run(keys[index])
            yield from ready()
        while len(weights) >= batch_size and sum(weights.values()) >= waiting:
            run(keys[first_held])
            yield from ready()
    while keys:
        run(keys[first_held])
        yield from ready()
