"""The library needs torch alone: in a process that refuses all other packages."""

import sys

from support import run

ALONE = """
import sys
from importlib.machinery import PathFinder

# torch, and what it requires.
ALLOWED = {
    'cpvt_pyramid', 'filelock', 'fsspec', 'functorch', 'jinja2', 'markupsafe', 'mpmath', 'networkx',
    'nvidia', 'setuptools', 'sympy', 'torch', 'torchgen', 'triton', 'typing_extensions',
}


class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition('.')[0]
        spec = PathFinder.find_spec(top) if top not in ALLOWED else None
        if spec is not None and 'site-packages' in str(spec.origin):
            raise ModuleNotFoundError(f'No module named {name!r}', name=top)


sys.meta_path.insert(0, Refuse())
for name in ('numpy', 'safetensors', 'tqdm', 'timm', 'mmengine', 'torchvision'):
    try:
        __import__(name)
    except ModuleNotFoundError:
        pass
    else:
        raise AssertionError(name)

import warnings

warnings.filterwarnings('ignore', 'Failed to initialize NumPy')
import torch

import cpvt_pyramid
from cpvt_pyramid import CPVT, CPVTPyramid, DenseCPVT, PEGConfig, accelerate, load_weights

for name in cpvt_pyramid.__all__:
    getattr(cpvt_pyramid, name)

folder = sys.argv[1]
image = torch.rand(2, 3, 64, 96)
small = dict(dim=16, heads=2, depth=2)
for i, build in enumerate((
    lambda: CPVTPyramid('pcpvt_nano'),
    lambda: CPVTPyramid('pcpvt_nano', position='learned+peg', in_channels=3),
    lambda: CPVT(small, num_classes=4, peg=PEGConfig(after=(0,))),
    lambda: DenseCPVT(small),
)):
    model, again = build(), build()
    for other in (model, again):
        other.eval()
    torch.save({'state_dict': {f'module.{k}': v for k, v in model.state_dict().items()}},
               f'{folder}/{i}.pth')
    report = load_weights(again, f'{folder}/{i}.pth')
    assert not report.kept and not report.unused
    with torch.no_grad():
        expected, found = model(image), again(image)
        for a, b in zip(expected, found):
            assert torch.equal(a, b)
        accelerate(again)
        again(image)
    again.load_state_dict(model.state_dict())
    sum(y.sum() for y in model.train()(image)).backward()
    assert all(p.grad is not None for p in model.parameters())

try:
    load_weights(CPVTPyramid('pcpvt_nano'), 'cpvt://pcpvt_nano')
except ImportError as error:
    assert 'pcpvt_nano.safetensors needs safetensors; pip install safetensors' in str(error)
else:
    raise AssertionError('safetensors was imported')
print('needs torch alone')
"""


def test_the_library_needs_torch_alone(tmp_path):
    done = run(sys.executable, '-c', ALONE, tmp_path)
    assert done.stdout.strip() == 'needs torch alone', done.stderr[-2000:]
