"""The GPU suite. It is part of `make test` where there is a GPU, and skipped elsewhere."""

from collections.abc import Iterator, Sequence

import pytest
import torch


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.path.parent.name == 'cuda':
                item.add_marker(pytest.mark.skip(reason='needs a GPU that this torch can use'))


@pytest.fixture(autouse=True)
def _exact_float32() -> Iterator[None]:
    """Without TF32, so that float32 results can be compared with those of a CPU."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision('highest')
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]
    torch.cuda.empty_cache()
