"""Every command of the README and of the documentation is run here as it is printed, or `NEEDS`
says what it needs that a test of a minute does not have, and which test runs it in another way.

That all commands of `cpvt` and tools parse is tested in test_readme.py.
"""

import glob
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import layouts
import pytest
from PIL import Image
from support import ROOT, clear_global_instances

from cpvt_pyramid.__main__ import main
from cpvt_pyramid.app import doctor
from cpvt_pyramid.app.export import batches

sys.path.insert(0, str(ROOT / 'tests'))
from extras import FIRST_TRAINING, first_training

PAGES = [
    *(ROOT / name for name in ('README.md', 'CONTRIBUTING.md', 'configs/README.md')),
    ROOT / 'examples/README.md',
    *sorted((ROOT / 'docs').glob('*.md')),
]
PROGRAMS = (
    r'cpvt|pip|python|\.venv/bin/python|make|git|tools/\S+|apt-get|sahi|sed|mim|torchrun|srun|curl'
)
COMMAND = re.compile(rf'([A-Z_]+=\S+ )*({PROGRAMS}) (?!\S+: )')  # and no message


class Need(NamedTuple):
    """What commands need, and where they are tested."""

    pattern: str
    what: str
    test: str


TRAINED = 'app/predict/test_pytorch.py'
NEEDS = (
    Need(r'git |pip |MMCV_WITH_OPS=1 pip |apt-get |sahi |sed ', 'a network', 'extras.py'),
    Need(r'make |\.venv/bin/python -m pytest', 'half an hour', 'checkout/test_release.py'),
    Need(r'cpvt (infer|app|test|export) \w+_(coco|cityscapes)( |$)', 'a download', TRAINED),
    Need('cpvt demo-data trees', 'a download', 'app/demo/test_trees.py'),
    Need(
        r'cpvt (train|infer|test) configs/(retinanet_cpvt_s|bands/)',
        'COCO, or hours',
        'app/training/test_train.py',
    ),
    Need(
        r'cpvt (train|infer|test|new-config) (my\.py|best\.pth|DATA|data\.yaml) ?(?!.*demo)',
        'a training of minutes; the README has one that is run here',
        'app/training/test_train.py',
    ),
    Need('cpvt (infer|test) CONFIG', 'a trained model', 'app/predict/test_infer.py'),
    Need(
        r'(python|mim|torchrun|srun python|python MMDET).*(train|validate)',
        "OpenMMLab's or timm's own scripts",
        'mm/test_mm_programs.py',
    ),
    Need('.*tools/(dist|slurm)_', 'several GPUs', 'app/training/test_launchers.py'),
    Need(r'python -m benchmarks\.', 'minutes', 'benchmarks/test_commands.py'),
    Need(r'python -m experiments\.', 'half an hour', 'experiments/position/test_position_lab.py'),
    Need(r'cpvt export (configs|pcpvt_small)', 'trained weights', 'app/export/test_tool.py'),
    Need(r'cpvt quantize|cpvt \w+ retinanet-int8', 'half a minute', 'app/export/test_quantize.py'),
    Need(
        r'cpvt verify .*(cuda|gpu|GPU|16|photographs)',
        'a GPU, or a minute',
        'app/exported/test_verify.py',
    ),
    Need('cpvt app |curl ', 'a browser, or a server', 'app/exported/test_app.py'),
    Need('cpvt convert-weights', 'a download', 'app/commands/test_convert_weights.py'),
    Need('cpvt infer .*--ray', 'Ray', 'app/predict/test_ray.py'),
)


def commands(page: Path) -> list[str]:
    """The commands of a page: in blocks of bash, and in indented lines."""
    text = page.read_text().replace('\\\n', '')
    lines = re.findall(
        r'^ {4}(\S.*)', re.sub(r'^ *```.*?^ *```', '', text, flags=re.M | re.S), re.M
    )
    for block in re.findall(r'^ *```bash\n(.*?)^ *```', text, re.M | re.S):
        lines += block.splitlines()
    lines = [re.sub(r'(^|\s+)#.*', '', line.strip()) for line in lines]
    return [re.sub(r'\s+', ' ', line) for line in lines if COMMAND.match(line)]


ALL = {page: commands(page) for page in PAGES}
PAGE_OF = {command: page for page in reversed(PAGES) for command in ALL[page]}  # the first one


def needs(command: str) -> list[Need]:
    return [need for need in NEEDS if re.match(need.pattern, command)]


def test_commands_are_found():
    assert sum(map(len, ALL.values())) > 100
    assert (
        'cpvt infer examples/trees.onnx examples/trees --score-thr 0.3' in ALL[ROOT / 'README.md']
    )
    assert [c for c in ALL[ROOT / 'README.md'] if c in FIRST_TRAINING] == FIRST_TRAINING


def test_what_others_need_is_certain():
    """Each reason is one of a command, and names a test that exists."""
    every = [command for page in ALL.values() for command in page]
    for need in NEEDS:
        assert [c for c in every if re.match(need.pattern, c)], need
        assert (ROOT / 'tests' / need.test).is_file(), need


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """What a reader of any page has: a checkout, photographs, a data set and an exported model."""
    for folder in ('configs', 'examples'):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    for folder in ('photos', 'IMAGES'):
        Path(folder).mkdir()
        for size in ((256, 192), (64, 80)):
            image = Image.open(ROOT / 'examples/trees/florida.jpg').crop((0, 0, *size))
            image.save(f'{folder}/{size[0]}.jpg')
    for name in ('MODEL', 'cityscapes'):
        shutil.copy(ROOT / 'examples/trees.onnx', f'{name}.onnx')
    layouts.coco_of_splits(tmp_path / 'data/trees')


@pytest.fixture
def quick_commands(monkeypatch):
    """The images of `cpvt verify` are small, and `cpvt doctor` imports into this process, which has
    most of it; test_doctor.py tests that it does so in another one."""
    monkeypatch.setattr(batches, 'SIZE', (64, 96))
    monkeypatch.setattr(batches, 'SMALLER', (48, 64))
    monkeypatch.setattr(doctor, 'tried', lambda names: [doctor.TRIALS[name][0]() for name in names])


def run(command: str) -> None:
    """Run a command of `cpvt` in this process, with what a shell makes of its patterns."""
    _, *words = shlex.split(command)
    arguments = [path for word in words for path in (sorted(glob.glob(word)) or [word])]
    assert main(arguments) == 0, command
    clear_global_instances()


def runs_here(page: Path) -> list[str]:
    """The commands that this page is the first to have, and that need nothing."""
    return [
        command
        for command in ALL[page]
        if PAGE_OF[command] == page and not needs(command) and command not in FIRST_TRAINING
    ]


@pytest.mark.usefixtures('reader', 'quick_commands')
@pytest.mark.parametrize(
    'page', filter(runs_here, PAGES), ids=lambda page: str(page.relative_to(ROOT))
)
def test_every_other_command_runs(page):
    results = 'results'  # of own_data.md, whose training takes minutes
    main(['infer', 'MODEL.onnx', 'photos', '--out-dir', results])
    main(['check-data', 'data/trees', '--out', 'data.yaml'])
    for number, command in enumerate(runs_here(page)):
        assert command.startswith('cpvt '), command
        for out in ('data.yaml', 'my.py'):
            if f'--out {out}' in command:
                Path(out).unlink(missing_ok=True)
        folder = f' --out-dir out{number}' if command.startswith('cpvt infer ') else ''
        run(command + folder * ('--out-dir' not in command))


# Two blocks and one map: it takes a minute to capture the model that is printed.
SMALLER_MODEL = """
_base_ = 'printed.py'
model = dict(
    backbone=dict(
        arch=dict(
            _delete_=True, dims=[8, 16], heads=[1, 2], mlp_ratios=[2, 2], depths=[1, 1],
            sr_ratios=[8, 4]),
        out_indices=(1,), init_cfg=None),
    neck=dict(in_channels=[16], start_level=0, out_channels=16, num_outs=1),
    bbox_head=dict(
        in_channels=16, feat_channels=16, stacked_convs=1, anchor_generator=dict(strides=[8])))
"""


def test_the_first_training(tmp_path, monkeypatch):
    """The README's way from nothing to an exported model, with fewer pages, one epoch and a smaller
    model. `make test-extras` runs it with the model that is printed (extras.py)."""
    monkeypatch.chdir(tmp_path)
    for command in first_training():
        run(command)
        if command.startswith('cpvt new-config '):
            Path('my.py').rename('printed.py')
            Path('my.py').write_text(SMALLER_MODEL)
    assert Path('work_dirs/my/curves.png').is_file() and Path('my.onnx').is_file()
