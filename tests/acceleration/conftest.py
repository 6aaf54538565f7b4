import pytest
import torch


@pytest.fixture(autouse=True)
def as_large_maps(nothing_is_small):
    """All tests of this folder, but those of small maps."""


@pytest.fixture
def cuda_is_default():
    """New tensors are on a GPU, if their device is not given, as in scripts of PyTorch 1."""
    if torch.version.cuda is None:
        pytest.skip('this PyTorch was built without CUDA')
    torch.set_default_tensor_type(torch.cuda.FloatTensor)
    yield
    torch.set_default_tensor_type(torch.FloatTensor)
