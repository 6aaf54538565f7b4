"""The notebook runs from its first to its last cell."""

import nbclient
import nbformat
from support import ROOT

SHORT = 'WORK = Path({!r})\nTRAIN, VAL, STEPS = 8, 2, 1'


def test_notebook(tmp_path):
    """With a tiny training; the set-up for Colab is in a condition that holds only there."""
    notebook = nbformat.read(ROOT / 'notebooks/cpvt_pyramid.ipynb', as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get('outputs') for cell in notebook.cells)
    (parameters,) = [c for c in notebook.cells if 'parameters' in c.metadata.get('tags', ())]
    parameters.source = SHORT.format(str(tmp_path))
    folder = {'metadata': {'path': ROOT / 'notebooks'}}
    nbclient.NotebookClient(notebook, timeout=120, resources=folder).execute()
    outputs = [output for cell in notebook.cells for output in cell.get('outputs', ())]
    pictures = [output for output in outputs if 'image/png' in output.get('data', ())]
    assert len(pictures) == 4 + 1
    assert (tmp_path / 'retinanet.onnx').is_file()
