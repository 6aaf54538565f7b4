"""Install each extra of the wheel that `make dist` built into its own environment, and use it.

`cpvt doctor` must find nothing broken there. There is one environment at a time. The last one has
what the README's first training needs, and runs its commands with fewer images.

    python tests/extras.py dist
    python tests/extras.py dist mm timm

Packages are the newest of the index, as a user gets them; with torch they take up to 6 GB.
"""

import os
import re
import sys
import tempfile
import zipfile
from pathlib import Path

from release import ROOT, run

# What is added to packages that are installed already, here to `runtime`.
ADDITIONS = ('video', 'heic', 'large', 'ray', 'demo', 'dev')
BUILD_CONFIG = """
from pathlib import Path
import cpvt_pyramid
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
import cpvt_pyramid.mm.detection, cpvt_pyramid.mm.segmentation
for name, scope in (('pages_retinanet', 'mmdet'), ('pages_semantic_fpn', 'mmseg')):
    configs = Path(cpvt_pyramid.__file__).with_name('.mim') / 'configs/demo'
    cfg = Config.fromfile(configs / f'{name}_cpvt_nano.py')
    init_default_scope(scope)
    model = MODELS.build(cfg.model)
    model.init_weights()
"""
TIMM = """
import timm, torch
import cpvt_pyramid.timm_models
assert timm.create_model('pcpvt_nano', pretrained=True)(torch.zeros(1, 3, 64, 64)).isfinite().all()
"""
TORCH = """
import torch
from cpvt_pyramid import CPVTPyramid, load_weights
from cpvt_pyramid.tasks.detectors import retinanet
assert str(load_weights(CPVTPyramid('pcpvt_nano'), 'cpvt://pcpvt_nano')).endswith('0 unused')
retinanet({'arch': 'pcpvt_nano'}, num_classes=2).eval()([torch.zeros(3, 64, 64)])
"""
LAB = """
import torch
import joblib, matplotlib, skimage, sklearn, scipy, torchmetrics, torchvision
from cpvt_pyramid import CPVTPyramid
CPVTPyramid('pcpvt_nano', position='rope')(torch.zeros(1, 3, 64, 64))
"""
INFER = 'cpvt infer EXAMPLES/trees.onnx EXAMPLES/trees/florida.jpg --out-dir out'
RUN = """
import sys
from pathlib import Path
from cpvt_pyramid.app.commands.infer import main
sys.exit(main([str(Path('EXAMPLES/trees.onnx')), 'a.NAME']))
"""
VIDEO = """
import av
from PIL import Image
with av.open('a.mp4', 'w') as container:
    stream = container.add_stream('libx264', rate=10)
    stream.width = stream.height = 64
    frame = av.VideoFrame.from_image(Image.new('RGB', (64, 64)))
    container.mux(stream.encode(frame))
    container.mux(stream.encode(None))
""" + RUN.replace('NAME', 'mp4')
HEIC = """
import pillow_heif
from PIL import Image
pillow_heif.from_pillow(Image.new('RGB', (64, 64))).save('a.heic')
""" + RUN.replace('NAME', 'heic')
# A use of each extra: a command in which EXAMPLES stands for the folder, or a program.
USES = {
    'torch': TORCH,
    'runtime': INFER,
    'app': 'cpvt app --help',
    'openvino': f'{INFER} --backend openvino',
    'quantize': 'cpvt quantize EXAMPLES/trees.onnx EXAMPLES/trees --out a.xml --agreement 0',
    'mm': BUILD_CONFIG,
    'video': VIDEO,
    'heic': HEIC,
    'large': f'{INFER} --tile 256',
    'ray': f'{INFER} --ray local --ray-workers 1',
    'timm': TIMM,
    'export': 'cpvt export pcpvt_nano cpvt://pcpvt_nano --out backbone.onnx',
    'demo': 'cpvt demo-data pages --root pages --train 2 --val 1',
    'lab': LAB,
    'dev': 'python -m pytest --version',
}

# The README's way from nothing to an exported model, as it is printed there, after the
# installation of these extras.
FIRST_EXTRAS = 'mm,demo,export'
FIRST_TRAINING = [
    re.sub(' *#.*', '', line)
    for line in re.search(
        rf"pip install '\.\[{FIRST_EXTRAS}\]'.*\n((?:cpvt .*\n)+)",
        (ROOT / 'README.md').read_text(encoding='utf-8'),
    )[1].splitlines()
]
SHORTER = {'--train 60 --val 20': '--train 4 --val 2', '--epochs 30': '--epochs 1'}


def first_training() -> list[str]:
    """The commands of FIRST_TRAINING, with fewer pages and one epoch."""
    text = '\n'.join(FIRST_TRAINING)
    for before, after in SHORTER.items():
        if before not in text:
            sys.exit(f'README.md must have {before!r} in its first training')
        text = text.replace(before, after)
    return text.splitlines()


def extras_of(wheel: Path) -> list[str]:
    """The names of the extras in the metadata of a wheel."""
    with zipfile.ZipFile(wheel) as file:
        (name,) = (n for n in file.namelist() if n.endswith('.dist-info/METADATA'))
        text = file.read(name).decode()
    return re.findall(r'^Provides-Extra: (\S+)', text, re.M)


class Environment:
    """A new environment in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        run('uv', 'venv', '--seed', '--python', sys.executable, folder / 'venv')
        binaries = folder / 'venv/bin'
        self.variables = {**os.environ, 'PATH': f'{binaries}:{os.environ["PATH"]}'}
        self.variables.pop('PYTHONPATH', None)

    def install(self, *packages: object) -> None:
        run('uv', 'pip', 'install', '--python', self.folder / 'venv/bin/python', *packages)

    def call(self, command: str) -> str:
        return run('bash', '-c', command, cwd=self.folder, env=self.variables)


def try_extra(wheel: Path, extra: str, folder: Path) -> None:
    """Install an extra, use it, and ask the doctor."""
    installed = f'runtime,{extra}' if extra in ADDITIONS else extra
    environment = Environment(folder)
    environment.install(f'{wheel}[{installed}]')
    table = environment.call('cpvt doctor')
    assert 'nothing is broken' in table, table
    use = USES[extra]
    if '\n' in use:
        program = folder / 'use.py'
        program.write_text(use.replace('EXAMPLES', str(ROOT / 'examples')))
        use = f'python {program}'
    environment.call(use.replace('EXAMPLES', str(ROOT / 'examples')))


def main(folder: str, *names: str) -> None:
    (wheel,) = Path(folder).resolve().glob('*.whl')
    extras = extras_of(wheel)
    unknown = {*extras} ^ USES.keys()
    if unknown:
        sys.exit(f'tests/extras.py and pyproject.toml must have the same extras: {sorted(unknown)}')
    for extra in names or extras:
        with tempfile.TemporaryDirectory() as place:
            try_extra(wheel, extra, Path(place))
        print(f'the extra {extra} is sound', flush=True)
    if not names:
        with tempfile.TemporaryDirectory() as place:
            environment = Environment(Path(place))
            environment.install(f'{wheel}[{FIRST_EXTRAS}]')
            for command in first_training():
                environment.call(command)
        print("the README's first training is sound", flush=True)


if __name__ == '__main__':
    main(*sys.argv[1:])
