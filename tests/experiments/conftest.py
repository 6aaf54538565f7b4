"""Muon, quickly."""

import pytest
import torch


def orthogonal(matrix: torch.Tensor, *_: object) -> torch.Tensor:
    """U V^T of the singular value decomposition U S V^T, which Muon approximates in bfloat16."""
    u, _, v = torch.linalg.svd(matrix.float(), full_matrices=False)
    return u @ v


@pytest.fixture(autouse=True, scope='module')
def _muon_without_bfloat16():
    """Processors that lack bfloat16 emulate it, at a hundredth of the speed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('torch.optim._muon._zeropower_via_newtonschulz', orthogonal)
        yield
