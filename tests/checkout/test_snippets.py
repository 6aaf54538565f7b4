"""The Python snippets of the documentation run as they are printed, from the top of a page down."""

import re
import textwrap
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from hub_server import serve_hub
from PIL import Image
from safetensors.torch import save
from support import ROOT

from cpvt_pyramid import ARCHS, CPVTPyramid
from cpvt_pyramid.checkpoints import downloads
from cpvt_pyramid.checkpoints.downloads import cached_path
from cpvt_pyramid.tasks.trained import TRAINED, build_trained

PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]
# Snippets that need a GPU, a cluster, a package that is not installed here or configs, by page and
# section: tests run them, too.
ELSEWHERE = {
    ('README.md', None): 'checkout/test_readme.py',
    ('docs/export.md', 'A backbone in your own pipeline'): 'core/test_export.py',
    ('docs/ecosystems.md', 'transformers'): 'with_transformers/test_backbones.py',
    ('docs/mm.md', None): 'mm/test_pages.py',
    ('docs/performance.md', 'On a GPU'): 'cuda/test_core.py',
    ('docs/predict.md', 'A model inside your own pipeline'): 'app/predict/test_ray.py',
    ('docs/predict.md', 'From Python'): 'app/predictions/test_kinds.py',
}

BLOCK_OR_HEADING = re.compile(r'^ *```(\w*)\n(.*?)^ *```|^#+ ([^\n]*)', re.M | re.S)


def snippets(page: Path) -> dict[str, list[str]]:
    """The Python code of a page, by section."""
    found = defaultdict(list)
    section = ''
    for language, code, heading in BLOCK_OR_HEADING.findall(page.read_text()):
        if heading:
            section = heading
        elif language == 'python':
            found[section].append(textwrap.dedent(code))
    return found


def test_every_snippet_is_found(tmp_path):
    page = tmp_path / 'page.md'
    page.write_text(
        '# A\n```bash\n# no heading\n```\n```python\n# no heading\na = 1\n```\n'
        '## B\n- item:\n\n  ```python\n  if a:\n      b\n  ```\n'
    )
    assert snippets(page) == {'A': ['# no heading\na = 1\n'], 'B': ['if a:\n    b\n']}


def runs_here(page: Path) -> list[str]:
    name = page.relative_to(ROOT).as_posix()
    code = []
    for section, blocks in snippets(page).items():
        if (name, section) not in ELSEWHERE and (name, None) not in ELSEWHERE:
            code += blocks
    return code


def test_snippets_that_run_elsewhere():
    for (name, section), test in ELSEWHERE.items():
        sections = snippets(ROOT / name)
        assert section in sections if section else sections, (name, section)
        assert name in (ROOT / 'tests' / test).read_text(), test


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """What a reader has: a checkout, a photograph, weights of a backbone, trained models in the
    cache, and a hub."""
    for folder in ('configs', 'examples'):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    pixels = np.random.default_rng(0).integers(256, size=(120, 160, 3), dtype=np.uint8)
    Image.fromarray(pixels).save('photo.jpg')
    depths = (1, 1, 1, 1)  # models are built often
    monkeypatch.setitem(ARCHS, 'pcpvt_small', ARCHS['pcpvt_small']._replace(depths=depths))
    torch.save(CPVTPyramid('pcpvt_small').state_dict(), 'pcpvt_small.pth')
    monkeypatch.setattr(torch.hub, '_hub_dir', str(tmp_path / 'torch'))
    # The files have random weights, and so not the hashes in their names.
    monkeypatch.setattr(downloads, 'checked', lambda path: path)
    monkeypatch.setitem(ARCHS, 'pvt_v2_b2', ARCHS['pvt_v2_b2']._replace(depths=depths))
    for name in ('retinanet_pvt_v2_b2_coco', 'segformer_b0_ade20k'):
        path = cached_path(TRAINED[name].url)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(build_trained(TRAINED[name]).state_dict(), path)
    with serve_hub(monkeypatch, tmp_path / 'cache') as hub:
        weights = save(timm.create_model('twins_pcpvt_small', depths=depths).state_dict())
        hub.repos['timm/twins_pcpvt_small.in1k'] = {'model.safetensors': weights}
        yield


@pytest.mark.usefixtures('reader')
@pytest.mark.parametrize(
    'page', [page for page in PAGES if runs_here(page)], ids=lambda page: page.stem
)
def test_snippets(page):
    names = {'__name__': '__main__'}
    for code in runs_here(page):
        exec(compile(code, page.name, 'exec'), names)
