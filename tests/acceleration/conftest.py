import pytest


@pytest.fixture(autouse=True)
def as_large_maps(nothing_is_small):
    """All tests of this folder, but those of small maps."""
