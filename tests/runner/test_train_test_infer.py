"""train.py, test.py, infer.py and their shell launchers, on a detector and a segmentor that are
tiny and a data set of 12 images."""

import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config, ConfigDict
from mmengine.logging import MessageHub, MMLogger
from mmengine.registry import DefaultScope
from mmengine.visualization import Visualizer
from PIL import Image
from support import ROOT, load_tool

from cpvt_pyramid.runner import launch, resume

TOOLS = ROOT / 'tools'
DIGITS = ('zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine')

# 96 x 96 for all images: in a batch of several sizes, each is padded, alone it is not.
DETECTOR = """
_base_ = [
    '{configs}/models/retinanet.py', '{configs}/datasets/coco_detection.py',
    '{configs}/schedules/detection_1x.py', '{configs}/runtime_detection.py']
model = dict(
    backbone=dict(arch='pcpvt_nano', drop_path_rate=0.3),
    neck=dict(in_channels=[32, 64, 128, 192], out_channels=16),
    bbox_head=dict(num_classes=10, in_channels=16, feat_channels=16, stacked_convs=1),
    test_cfg=dict(score_thr=0.001))
load, resize, pack = (
    [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations', with_bbox=True)],
    [dict(type='Resize', scale=(96, 96), keep_ratio=False)],
    [dict(type='PackDetInputs')])
common = dict(
    serialize_data=False, data_root='{data}/coco', metainfo=dict(classes={classes}))
train_dataloader = dict(
    num_workers=0, persistent_workers=False, batch_sampler=None,
    dataset=dict(
        **common, pipeline=load + resize + [dict(type='RandomFlip', prob=0.5)] + pack))
val_dataloader = dict(
    num_workers=0, persistent_workers=False,
    dataset=dict(**common, pipeline=load[:1] + resize + load[1:] + pack))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file='{data}/coco/annotations/instances_val2017.json')
test_evaluator = val_evaluator
train_cfg = dict(max_epochs=3, val_interval=100)
param_scheduler = [dict(type='MultiStepLR', milestones=[2])]
optim_wrapper = dict(optimizer=dict(lr=1e-3))
default_hooks = dict(logger=dict(interval=1))
tta_pipeline = None
randomness = dict(seed=3)
"""
SEGMENTOR = """
_base_ = [
    '{configs}/models/semantic_fpn.py', '{configs}/datasets/ade20k.py',
    '{configs}/schedules/segmentation_80k.py', '{configs}/runtime_segmentation.py']
model = dict(
    data_preprocessor=dict(size=(64, 64)),
    backbone=dict(arch='pcpvt_nano', drop_path_rate=0.3),
    neck=dict(in_channels=[32, 64, 128, 192], out_channels=16),
    decode_head=dict(in_channels=[16, 16, 16, 16], channels=16, num_classes=11))
load = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations', reduce_zero_label=True)]
resize = [dict(type='Resize', scale=(96, 96), keep_ratio=True)]
augment = [
    dict(type='RandomCrop', crop_size=(64, 64)), dict(type='RandomFlip', prob=0.5),
    dict(type='PhotoMetricDistortion')]
pack = [dict(type='PackSegInputs')]
common = dict(
    type='BaseSegDataset', reduce_zero_label=True, serialize_data=False,
    data_root='{data}/ade/ADEChallengeData2016',
    metainfo=dict(classes=('background',) + {classes}))
train_dataloader = dict(
    num_workers=0, persistent_workers=False, batch_size=2,
    dataset=dict(**common, pipeline=load + resize + augment + pack))
val_dataloader = dict(
    num_workers=0, persistent_workers=False,
    dataset=dict(**common, pipeline=load[:1] + resize + load[1:] + pack))
test_dataloader = val_dataloader
train_cfg = dict(max_iters=12, val_interval=100)
param_scheduler = [dict(type='PolyLR', power=0.9, by_epoch=False, end=12)]
optim_wrapper = dict(optimizer=dict(lr=1e-3))
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(interval=5))
tta_pipeline = None
randomness = dict(seed=3)
"""


train, test, infer = map(load_tool, ('train', 'test', 'infer'))


@pytest.fixture(scope='module', autouse=True)
def _one_cpu() -> Iterator[None]:
    """Runs in one process and in another are equal to the last bit on a CPU, and with the same
    number of threads; one is the fastest at this size."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('mmengine.device.utils.DEVICE', 'cpu')
        # Data workers of a training that was collected as garbage never hear that they may end.
        patch.setattr('torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL', 0.1)
        patch.setenv('CUDA_VISIBLE_DEVICES', '-1')  # of the processes started here
        patch.setenv('OMP_NUM_THREADS', '1')
        patch.setenv('PYTHON', sys.executable)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test in an empty folder and without what mmengine keeps of runs before."""
    monkeypatch.chdir(tmp_path)
    yield
    for kept in (DefaultScope, MessageHub, MMLogger, Visualizer):
        kept._instance_dict.clear()


@pytest.fixture(scope='module')
def configs(sample_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp('configs')
    for name, text in (('detector', DETECTOR), ('segmentor', SEGMENTOR)):
        text = text.replace('{configs}', str(ROOT / 'configs/_base_'))
        text = text.replace('{data}', str(sample_dataset)).replace('{classes}', repr(DIGITS))
        (folder / f'{name}.py').write_text(text)
    return {path.stem: path for path in folder.iterdir()}


@pytest.fixture(scope='module')
def trained(configs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of an uninterrupted training of each model."""
    folders = {name: tmp_path_factory.mktemp(name) for name in configs}
    for name, folder in folders.items():
        assert train.main([str(configs[name]), '--work-dir', str(folder)]) == 0
    return folders


@pytest.fixture(scope='module')
def weights(trained: dict[str, Path]) -> dict[str, str]:
    return {
        'detector': str(trained['detector'] / 'epoch_3.pth'),
        'segmentor': str(trained['segmentor'] / 'iter_12.pth'),
    }


def run(*command: object, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=os.environ | environment
    )


def state(checkpoint: Path) -> dict[str, torch.Tensor]:
    return torch.load(checkpoint, weights_only=False)['state_dict']


def assert_same_state(a: Path, b: Path) -> None:
    a, b = state(a), state(b)
    assert a.keys() == b.keys()
    assert not [name for name in a if not torch.equal(a[name], b[name])]


def logged(checkpoint: Path, name: str) -> np.ndarray:
    """What the training logged under this name, iteration by iteration."""
    hub = torch.load(checkpoint, weights_only=False)['message_hub']
    return hub['log_scalars'][f'train/{name}'].data[0]


# Training that is killed


FAULTS = """
import builtins, io, os, signal
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

open_really = io.open

class HalfWritten:
    def __init__(self, file):
        self.file = file
    def __enter__(self):
        return self
    def __exit__(self, *_):
        pass
    def write(self, data):
        self.file.write(data[:len(data) // 2])
        self.file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

def open_badly(file, mode='r', *args, **options):
    opened = open_really(file, mode, *args, **options)
    torn = 'w' in mode and os.environ.get('KILL_WRITING', 'never') in str(file)
    return HalfWritten(opened) if torn else opened

io.open = builtins.open = open_badly

@HOOKS.register_module()
class KillHook(Hook):
    def after_train_iter(self, runner, *_, **__):
        if runner.iter + 1 == int(os.environ.get('KILL_AFTER', 0)):
            os.kill(os.getpid(), signal.SIGKILL)
"""


def train_until_killed(config: Path, *options: str, **fault: str) -> None:
    """Train in a process that is killed; FAULTS tells of the ways."""
    Path('faults.py').write_text(FAULTS)
    faulty = Path(f'faulty_{config.name}')
    faulty.write_text(
        f"_base_ = ['{config}']\n"
        'custom_imports = _base_.custom_imports\n'
        "custom_imports['imports'].append('faults')\n"
        "custom_hooks = [dict(type='KillHook')]\n"
    )
    command = [sys.executable, TOOLS / 'train.py', faulty, '--work-dir', 'killed', *options]
    ended = run(*command, PYTHONPATH=os.getcwd(), **fault)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def test_killed_while_writing_a_checkpoint(configs, trained):
    """By epochs, with data workers that live on; the reference has none."""
    workers = 'train_dataloader.num_workers=2', 'train_dataloader.persistent_workers=True'
    train_until_killed(configs['detector'], '--cfg-options', *workers, KILL_WRITING='epoch_2.pth')
    assert [path.name for path in Path('killed').glob('*.pth')] == ['epoch_1.pth']
    command = [str(configs['detector']), '--work-dir', 'killed', '--resume']
    assert train.main([*command, '--cfg-options', *workers]) == 0
    assert_same_state(Path('killed/epoch_3.pth'), trained['detector'] / 'epoch_3.pth')
    assert not list(Path('killed').rglob('*partial*'))


def test_killed_between_checkpoints(configs, trained):
    """By iterations: checkpoints at 5 and 10, killed after 8 of 12."""
    workers = 'train_dataloader.num_workers=2', 'train_dataloader.persistent_workers=True'
    train_until_killed(configs['segmentor'], '--cfg-options', *workers, KILL_AFTER='8')
    command = [str(configs['segmentor']), '--work-dir', 'killed', '--resume']
    assert train.main([*command, '--cfg-options', *workers]) == 0
    assert_same_state(Path('killed/iter_12.pth'), trained['segmentor'] / 'iter_12.pth')


def test_no_moment_without_a_whole_checkpoint(configs, monkeypatch):
    """With a single checkpoint to keep: the one before goes when the next is in place."""
    put = resume.AtomicBackend.put

    def fail_at_the_second(self: resume.AtomicBackend, obj: bytes, path: str) -> None:
        put(self, obj[: len(obj) // 2] if 'epoch_2' in path else obj, path)
        if 'epoch_2' in path:
            Path(path).unlink()
            raise OSError('disk full')

    monkeypatch.setattr(resume.AtomicBackend, 'put', fail_at_the_second)
    command = [str(configs['detector']), '--work-dir', 'work']
    with pytest.raises(OSError, match='disk full'):
        train.main([*command, '--cfg-options', 'default_hooks.checkpoint.max_keep_ckpts=1'])
    assert resume.last_checkpoint(Path('work')).name == 'epoch_1.pth'


def test_an_interrupt_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / 'file.pth'
    path.write_bytes(b'whole')

    def interrupted(self: Path, content: bytes) -> None:
        with self.open('wb') as file:
            file.write(content[:2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, 'write_bytes', interrupted)
    with pytest.raises(KeyboardInterrupt):
        resume.AtomicBackend().put(b'the next', path)
    assert [p.name for p in tmp_path.iterdir()] == ['file.pth']
    assert path.read_bytes() == b'whole'


@pytest.mark.parametrize(
    'signum, said, status',
    [(signal.SIGINT, 'interrupted', 130), (signal.SIGTERM, 'terminated', 143)],
)
def test_signals_unwind_and_give_the_status(signum, said, status, tmp_path, capsys, request):
    # What shells start in the background ignores interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    def write() -> None:
        with resume.appearing_whole(tmp_path / 'file') as partial:
            partial.write_text('ha')
            try:
                signal.raise_signal(signum)
            except:  # noqa: E722 as mmengine does while it formats a config
                raise SyntaxError from None

    assert launch.run_tool('tool', write, {}, 'once more') == status
    assert capsys.readouterr().err == f'tool: {said}; once more\n'
    assert not list(tmp_path.iterdir())


def test_errors_that_are_no_mistakes_of_the_user_are_raised():
    with pytest.raises(ZeroDivisionError):
        launch.run_tool('tool', lambda: 1 // 0, {}, 'once more')


def test_last_checkpoint_is_the_last_whole_one(tmp_path, trained):
    whole = torch.load(trained['detector'] / 'epoch_2.pth', weights_only=False)
    for epoch, second in ((1, 10), (10, 12), (2, 14), (9, 15)):  # 2: trained anew, from 1
        whole['meta'] |= {'iter': 4 * epoch, 'time': f'20260101_0000{second}'}
        torch.save(whole, tmp_path / f'epoch_{epoch}.pth')
    os.truncate(tmp_path / 'epoch_9.pth', 20_000_000)
    torch.save({'state_dict': {}, 'meta': whole['meta']}, tmp_path / 'best_epoch_11.pth')
    (tmp_path / 'last_checkpoint').write_text('')  # torn, too
    assert resume.last_checkpoint(tmp_path).name == 'epoch_2.pth'


def test_resume_takes_over_a_seed_that_the_config_leaves_open(trained, configs):
    cfg = Config({'work_dir': str(trained['detector']), 'randomness': {'deterministic': True}})
    train.choose_start(cfg, 'auto')
    assert cfg.randomness == {'deterministic': True, 'seed': 3}
    assert cfg.resume and cfg.load_from == str(trained['detector'] / 'epoch_3.pth')


def test_a_config_that_mmengine_wrote_is_made_resumable_once(trained):
    cfg = Config.fromfile(trained['detector'] / 'detector.py')
    text = cfg.pretty_text
    resume.make_resumable(cfg)
    assert cfg.pretty_text == text and text.count('Seeded') == 2 and text.count("'SeedHook'") == 1


def test_resume_begins_where_there_is_nothing_yet(tmp_path, capsys):
    cfg = Config({'work_dir': str(tmp_path)})
    train.choose_start(cfg, 'auto')
    assert not cfg.resume and 'from the beginning' in capsys.readouterr().out


# The options of a training


NO_VALIDATION = 'val_cfg=None', 'val_dataloader=None', 'val_evaluator=None'


def test_mixed_precision_takes_a_step_on_the_cpu(configs):
    command = [str(configs['detector']), '--work-dir', 'work', '--amp', '--cfg-options']
    assert train.main([*command, 'train_cfg.max_epochs=1', *NO_VALIDATION]) == 0
    cfg = Config.fromfile('work/detector.py')
    assert cfg.optim_wrapper.type == 'BFloat16OptimWrapper'
    losses = logged(Path('work/epoch_1.pth'), 'loss')
    assert np.isfinite(losses).all() and losses[0] != losses[-1]


def test_auto_scale_lr(configs):
    """Batches of 2 where the config says 16."""
    command = [str(configs['detector']), '--work-dir', 'work', '--auto-scale-lr', '--cfg-options']
    assert train.main([*command, 'train_cfg.max_epochs=1', *NO_VALIDATION]) == 0
    assert logged(Path('work/epoch_1.pth'), 'lr')[0] == pytest.approx(1e-3 * 2 / 16)


def test_two_processes_are_one_with_the_total_batch(configs):
    """The augmentations as well: they belong to a sample, whichever process deals with it."""
    config = str(configs['detector'])
    options = '--cfg-options', 'model.backbone.drop_path_rate=0', *NO_VALIDATION
    assert train.main([config, '--work-dir', 'one', *options]) == 0
    command = [TOOLS / 'dist_train.sh', config, '2', '--work-dir', 'two', *options]
    ended = run(*command, 'train_dataloader.batch_size=1')
    assert ended.returncode == 0, ended.stderr
    for name in ('loss', 'loss_cls', 'loss_bbox'):
        one, two = (logged(Path(folder, 'epoch_3.pth'), name) for folder in ('one', 'two'))
        assert len(one) == len(two) == 12
        np.testing.assert_allclose(one[0], two[0], rtol=1e-6)
        # AdamW divides small gradients by their size, and so their rounding comes to count.
        np.testing.assert_allclose(one, two, rtol=1e-3)


# Launchers


FAKE = '#!/bin/sh\necho "$0" "$@"\n'


def fake_program(name: str) -> Path:
    """A program that says how it was called."""
    path = Path('bin', name).absolute()
    path.parent.mkdir(exist_ok=True)
    path.write_text(FAKE)
    path.chmod(0o755)
    return path


def test_slurm(configs):
    path = f'{fake_program("srun").parent}:{os.environ["PATH"]}'
    command = [TOOLS / 'slurm_train.sh', 'gpu', 'a job', configs['detector'], '--resume']
    said = run(*command, PATH=path, PYTHON='py', GPUS='4', SRUN_ARGS='--time=9 --qos=high').stdout
    assert said.split(maxsplit=1)[1].strip() == (
        '--partition=gpu --job-name=a job --gres=gpu:4 --ntasks=4 --ntasks-per-node=4 '
        '--cpus-per-task=5 --kill-on-bad-exit=1 --time=9 --qos=high '
        f'py -u {TOOLS}/train.py {configs["detector"]} --launcher slurm --resume'
    )


def test_dist_test(configs):
    config = configs['detector']
    command = [TOOLS / 'dist_test.sh', config, 'weights.pth', '3', '--tta']
    said = run(*command, PYTHON=str(fake_program('py'))).stdout
    assert said.split(maxsplit=1)[1].strip() == (
        f'{TOOLS}/torchrun.py 3 {TOOLS}/test.py {config} weights.pth --launcher pytorch --tta'
    )


@pytest.mark.parametrize(
    'command, complaint',
    [
        (['dist_train.sh'], 'needs CONFIG and NPROC'),
        (['dist_train.sh', 'nowhere.py', '2'], 'no config at nowhere.py'),
        (['dist_train.sh', __file__, 'two'], 'NPROC is a number of processes, not two'),
        (['dist_test.sh', __file__, 'weights.pth'], 'needs CONFIG, CHECKPOINT and NPROC'),
        (['dist_test.sh', __file__, 'weights.pth', '0'], 'NPROC is a number of processes, not 0'),
        (['slurm_train.sh', 'gpu', 'job', 'nowhere.py'], 'no config at nowhere.py'),
        (['slurm_train.sh', 'gpu', 'job', __file__], 'no srun here'),
    ],
)
def test_mistakes_with_the_shell_launchers(command, complaint):
    ended = run(TOOLS / command[0], *command[1:])
    assert ended.returncode == 2
    assert ended.stderr.startswith(f'{command[0]}: {complaint}') and ended.stderr.count('\n') == 1


def test_torchrun_passes_the_exit_status_on():
    Path('fails.py').write_text('import sys; sys.exit(2)')
    ended = run(sys.executable, TOOLS / 'torchrun.py', '2', 'fails.py')
    assert (ended.returncode, ended.stderr) == (2, '')


@pytest.mark.parametrize('tool', ['train.py', 'test.py', 'infer.py'])
def test_help_is_quick(tool):
    ended = run(sys.executable, '-X', 'importtime', TOOLS / tool, '--help')
    assert ended.returncode == 0 and ended.stdout.startswith(f'usage: {tool[:-3]} ')
    imported = set(re.findall(r'(\w+)\S*$', ended.stderr, re.M))
    assert 'argparse' in imported and not imported & {'torch', 'mmengine', 'numpy'}


@pytest.mark.parametrize('tool', ['dist_train.sh', 'dist_test.sh', 'slurm_train.sh'])
def test_help_of_the_shell_launchers(tool):
    ended = run(TOOLS / tool, '--help')
    assert ended.returncode == 0 and ended.stdout.startswith(f'usage: {tool} ')


# Evaluation


@pytest.mark.parametrize('tta', [(), ('--tta',)])
def test_evaluation_of_a_detector(configs, weights, tta, capsys):
    shown = ['--out', 'found/all.pkl', '--show-dir', 'shown']
    assert test.main([str(configs['detector']), weights['detector'], *shown, *tta]) == 0
    table = capsys.readouterr().out
    assert re.search(r'Average Precision.*\n(.*\n)*coco/bbox_mAP_50 +[\d.e-]+\n', table)
    found = pickle.loads(Path('found/all.pkl').read_bytes())
    assert len(found) == 4 and all(len(sample['pred_instances']['bboxes']) for sample in found)
    assert len(list(Path('shown').glob('*.png'))) == 4
    assert list(Path('work_dirs/detector/test').glob('*/*.json'))


@pytest.mark.parametrize('tta', [(), ('--tta',)])
def test_evaluation_of_a_segmentor(configs, weights, tta, capsys, sample_dataset):
    shown = ['--out', 'found/all.pkl', '--show-dir', 'shown']
    assert test.main([str(configs['segmentor']), weights['segmentor'], *shown, *tta]) == 0
    assert re.search(r'\nmIoU +[\d.]+\n', capsys.readouterr().out)
    found = pickle.loads(Path('found/all.pkl').read_bytes())
    assert len(found) == 4 and not any('seg_logits' in sample for sample in found)
    for sample in found:
        with Image.open(sample['img_path']) as image:
            assert sample['pred_sem_seg']['data'].shape[-2:] == image.size[::-1]
    assert len(list(Path('shown').glob('*.png'))) == 4


def test_the_augmented_pipeline_is_the_test_pipeline_at_three_sizes_and_flipped():
    resize = {'type': 'Resize', 'scale': (200, 100), 'keep_ratio': True}
    pack = {'type': 'PackDetInputs', 'meta_keys': ('img_id',)}
    first, many = test.augmented([{'type': 'LoadImageFromFile'}, resize, pack])
    assert first == {'type': 'LoadImageFromFile'}
    assert many['transforms'] == [
        [resize | {'scale': scale} for scale in ((150, 75), (200, 100), (250, 125))],
        [{'type': 'RandomFlip', 'prob': 0.0}, {'type': 'RandomFlip', 'prob': 1.0}],
        [{'type': 'PackDetInputs'}],
    ]


def test_classes_come_from_the_config_where_the_checkpoint_has_none(configs):
    from cpvt_pyramid.runner.prediction import dataset_meta

    cfg = launch.load_config(configs['detector'])
    assert dataset_meta(cfg, {'meta': {'dataset_meta': {'CLASSES': ('x',)}}})['classes'] == ('x',)
    assert tuple(dataset_meta(cfg, {})['classes']) == DIGITS


# Users' mistakes: one line and status 2


@pytest.fixture
def mistaken(configs: dict[str, Path], weights: dict[str, str]) -> Callable[[str], str]:
    """Fills in the names of files, some of which are as they should be and some are not."""
    Path('syntax.py').write_text('model = dict(\n')
    Path('part.py').write_text('data_root = "/"\n')
    Path('empty').mkdir()
    torn = Path('torn.pth')
    torn.write_bytes(Path(weights['detector']).read_bytes()[:100_000])
    names = {f'{name.upper()}.py': str(path) for name, path in configs.items()}
    names |= {f'{name.upper()}.pth': path for name, path in weights.items()}
    names['USED'] = str(Path(weights['detector']).parent)

    def fill_in(text: str) -> str:
        for name, path in names.items():
            text = text.replace(name, path)
        return text

    return fill_in


@pytest.mark.parametrize(
    'tool, command, complaint',
    [
        (train, 'nowhere.py', 'no config at nowhere.py'),
        (train, 'syntax.py', 'config syntax.py: SyntaxError: '),
        (train, 'part.py', 'part.py describes no model'),
        (
            train,
            'DETECTOR.py --cfg-options default_scope=mmrotate',
            'DETECTOR.py sets default_scope to neither mmdet nor mmseg',
        ),
        (train, 'DETECTOR.py --cfg-options load_from=x.pth', 'no checkpoint at x.pth'),
        (
            train,
            'DETECTOR.py --cfg-options model.backbone.init_cfg.type=Pretrained '
            'model.backbone.init_cfg.checkpoint=x.pth',
            'no checkpoint at x.pth',
        ),
        (train, 'DETECTOR.py --launcher pytorch', '--launcher pytorch is for processes that'),
        (train, 'DETECTOR.py --cfg-options a', "--cfg-options takes key=value, not 'a'"),
        (
            train,
            'DETECTOR.py --cfg-options trian_cfg.max_epochs=1',
            "--cfg-options trian_cfg.max_epochs: no config has a key 'trian_cfg'; did you mean "
            "'train_cfg'?",
        ),
        (
            train,
            'DETECTOR.py --cfg-options train_dataloader.dataset.data_root=x',
            'no train data at',
        ),
        (train, 'DETECTOR.py --cfg-options val_evaluator.ann_file=x', 'no annotations at '),
        (train, 'DETECTOR.py --work-dir syntax.py/x', 'cannot make the folder syntax.py/x: '),
        (train, 'DETECTOR.py --work-dir USED', 'USED holds the checkpoints of a training'),
        (train, 'DETECTOR.py --resume nowhere.pth', 'no checkpoint at nowhere.pth'),
        (train, 'DETECTOR.py --resume torn.pth', 'torn.pth is not a whole checkpoint'),
        (train, 'DETECTOR.py --resume SEGMENTOR.pth', 'SEGMENTOR.pth is of another model'),
        (
            train,
            'DETECTOR.py --auto-scale-lr --cfg-options auto_scale_lr.base_batch_size=0',
            '--auto-scale-lr: the config has no auto_scale_lr.base_batch_size',
        ),
        (
            train,
            'DETECTOR.py --amp --cfg-options optim_wrapper.type=ApexOptimWrapper',
            '--amp replaces an OptimWrapper, and the config has a ApexOptimWrapper',
        ),
        (test, 'DETECTOR.py nowhere.pth', 'no checkpoint at nowhere.pth'),
        (test, 'DETECTOR.py torn.pth', 'torn.pth is not a whole checkpoint'),
        (test, 'SEGMENTOR.py DETECTOR.pth', 'DETECTOR.pth is of another model'),
        (test, 'DETECTOR.py DETECTOR.pth --out all.json', '--out writes a pickle'),
        (infer, 'DETECTOR.py nowhere.pth syntax.py', 'no checkpoint at nowhere.pth'),
        (infer, 'DETECTOR.py DETECTOR.pth nowhere.jpg', 'no image or folder at nowhere.jpg'),
        (infer, 'DETECTOR.py DETECTOR.pth empty', 'no images in the folder empty'),
        (infer, 'DETECTOR.py DETECTOR.pth *.jpg', 'no files match *.jpg'),
        (infer, 'DETECTOR.py DETECTOR.pth empty --batch-size 0', '--batch-size 0; at least 1'),
        (infer, 'DETECTOR.py DETECTOR.pth empty --memory 1G', '--memory goes with --tile'),
        (infer, 'DETECTOR.py DETECTOR.pth empty --tile 100', 'tile 100 and overlap 0; both are'),
        (
            infer,
            'DETECTOR.py DETECTOR.pth empty --tile 64 --memory much',
            "'much' is no amount of memory; for example 2GiB",
        ),
        (infer, 'DETECTOR.py DETECTOR.pth syntax.py --device gpu', 'no device gpu: '),
        (infer, 'SEGMENTOR.py DETECTOR.pth syntax.py', 'DETECTOR.pth is of another model'),
    ],
)
def test_mistakes(tool, command, complaint, mistaken, capsys):
    assert tool.main(mistaken(command).split()) == 2
    name = tool.__name__.removeprefix('tool_')
    errors = capsys.readouterr().err
    assert errors.startswith(f'{name}: {mistaken(complaint)}') and errors.count('\n') == 1


def test_missing_data_names_the_path_and_the_layout(monkeypatch, capsys):
    config = ROOT / 'configs/retinanet_cpvt_s.py'
    monkeypatch.setenv('COCO_ROOT', '/nowhere/data/coco')
    assert train.main([str(config)]) == 2
    assert capsys.readouterr().err == (
        'train: no train data at /nowhere/data/coco/annotations/instances_train2017.json. '
        'Expected in /nowhere/data/coco: annotations/instances_train2017.json, train2017/, '
        'annotations/instances_val2017.json, val2017/. '
        'If it is elsewhere: COCO_ROOT=/path/to/coco\n'
    )
    assert not Path('work_dirs').exists()


def test_data_sets_are_found_inside_their_wrappers(tmp_path):
    def there(name: str) -> ConfigDict:
        return ConfigDict(type='X', data_root=str(tmp_path), data_prefix=ConfigDict(img=name))

    (tmp_path / 'a').mkdir()
    wrapped = ConfigDict(
        type='RepeatDataset', dataset=dict(type='ConcatDataset', datasets=[there('a'), there('b')])
    )
    cfg = Config({'train_dataloader': {'dataset': wrapped}})
    with pytest.raises(launch.UserError, match=f'no train data at {tmp_path}/b. Expected'):
        launch.check_data(cfg, 'train')
    launch.check_data(cfg, 'val')
    (tmp_path / 'b').mkdir()
    launch.check_data(cfg, 'train')
