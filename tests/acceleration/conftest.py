import pytest

from cpvt_pyramid.acceleration import norms, products


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch):
    """Also small maps, of which these tests are, are computed as large ones."""
    monkeypatch.setattr(products, 'FEW_OPERATIONS', 0)
    monkeypatch.setattr(products, 'FEW_TOKENS', 0)
    monkeypatch.setattr(norms, 'FEW_VALUES', 0)
