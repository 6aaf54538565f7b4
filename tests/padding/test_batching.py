"""Batches of one size, against sorting by hand."""

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpvt_pyramid.padding.batching import map_in_batches, padded_size

Item = tuple[int, int]  # index and key


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(1, 9), st.integers(1, 20))
def test_results_are_in_order_and_few_items_are_held(
    keys: list[int], batch_size: int, waiting: int
) -> None:
    read, found = [], []
    batches: list[Sequence[Item]] = []

    def items() -> Iterator[Item]:
        for item in enumerate(keys):
            read.append(item)
            yield item

    def run(batch: list[Item]) -> list[Item]:
        batches.append(batch)
        return batch

    for result in map_in_batches(run, items(), lambda item: item[1], batch_size, waiting):
        found.append(result)
        assert len(read) - len(found) < max(waiting, batch_size)
    assert found == list(enumerate(keys))
    for batch in batches:
        assert 1 <= len(batch) <= batch_size and len({key for _, key in batch}) == 1
    if waiting >= len(keys):  # nothing had to run early
        assert len(batches) == sum(-(-keys.count(key) // batch_size) for key in set(keys))


def test_a_function_that_loses_a_result_is_an_error() -> None:
    with pytest.raises(ValueError, match='batch of 2 needs as many results, got 1'):
        list(map_in_batches(lambda batch: batch[:1], 'ab', lambda _: 0, 2))


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 64))
def test_padded_size(height: int, width: int, multiple: int) -> None:
    for side, padded in zip((height, width), padded_size((height, width), multiple)):
        assert padded % multiple == 0 and 0 <= padded - side < multiple
