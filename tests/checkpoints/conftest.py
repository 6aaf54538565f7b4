import pytest


@pytest.fixture(scope='module')
def published() -> dict:
    """A classification checkpoint with the official names."""
    from foreign import of_timm  # needs the mm packages, as not all tests of this folder do

    return of_timm('pcpvt_nano').state_dict()
