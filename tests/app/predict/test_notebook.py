"""The notebook runs from its first to its last cell."""

import subprocess
import sys

import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from PIL.Image import Image
from support import ROOT

from cpvt_pyramid.__main__ import main

SHORT = 'WORK = Path({!r})\nTRAIN, VAL, STEPS = 8, 2, 1'


def run_here(command, check):
    """A command of ours without another process, which imports for seconds."""
    assert command[:3] == [sys.executable, '-m', 'cpvt_pyramid'] and check
    assert main([str(word) for word in command[3:]]) == 0


def test_notebook(tmp_path, monkeypatch):
    """With a tiny training on small images; the set-up for Colab is in a condition that holds only
    there."""
    notebook = nbformat.read(ROOT / 'notebooks/cpvt_pyramid.ipynb', as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == 'code']
    assert not any(cell.outputs for cell in cells)
    (parameters,) = [c for c in cells if 'parameters' in c.metadata.get('tags', ())]
    parameters.source = SHORT.format(str(tmp_path))
    monkeypatch.chdir(ROOT / 'notebooks')
    monkeypatch.setattr(sys, 'path', [*sys.path])
    monkeypatch.setattr(subprocess, 'run', run_here)
    shown = []
    names = {'display': shown.append}
    (training,) = [cell for cell in cells if 'max_size=480' in cell.source]
    training.source = training.source.replace('max_size=480', 'max_size=160')
    for cell in cells:
        exec(TransformerManager().transform_cell(cell.source), names)
    assert len(shown) == 3 + 1 and all(isinstance(picture, Image) for picture in shown)
    assert (tmp_path / 'retinanet.onnx').is_file()
