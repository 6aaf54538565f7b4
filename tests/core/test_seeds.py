"""Random numbers are the same in every run, also in the examples of Hypothesis."""

import torch
from hypothesis import given
from hypothesis import strategies as st

FIRST = torch.randn(3, generator=torch.Generator().manual_seed(0))


def test_a_test_starts_with_the_same_numbers():
    assert torch.equal(torch.randn(3), FIRST)


@given(st.integers(1, 5))
def test_an_example_does_not_depend_on_those_before_it(count):
    numbers = torch.randn(3 * count)
    assert torch.equal(numbers[:3], FIRST)
