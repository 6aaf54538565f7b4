import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import ROOT


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope='session')
def sample_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small sample data set in both layouts: 8 training and 4 validation images."""
    root = tmp_path_factory.mktemp('data') / 'sample'
    command = [sys.executable, ROOT / 'tools/demo/sample_dataset.py', root]
    subprocess.run([*command, '--train', '8', '--val', '4'], check=True, capture_output=True)
    return root
