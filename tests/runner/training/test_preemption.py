"""Trainings that are stopped or killed, at any moment, and go on as if nothing had happened."""

import errno
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from mmengine.config import Config
from mmengine.logging import MessageHub
from support import assert_same, clear_global_instances, in_processes, load_tool
from tiny_mm import Interruptions  # noqa: F401 (registered)

from cpvt_pyramid.config.load import load_config
from cpvt_pyramid.config.plan import apply
from cpvt_pyramid.runner.training import preemption, resume
from cpvt_pyramid.runner.training.plan import plan_start
from cpvt_pyramid.runner.training.start import find_start, last_checkpoint

train = load_tool('train')
TERM, USR1 = int(signal.SIGTERM), int(signal.SIGUSR1)

# Averaged weights, batches by aspect ratio, an evaluation after each of 3 epochs of 3 batches.
BY_EPOCHS = """
_base_ = ['{base}']
train_dataloader = dict(
    batch_size=3, num_workers={workers}, persistent_workers=bool({workers}),
    batch_sampler=dict(_delete_=True, type='AspectRatioBatchSampler'))
val_dataloader = dict(dataset=dict(indices=2))
train_cfg = dict(val_interval=1)
default_hooks = dict(checkpoint=dict(max_keep_ckpts=1))
custom_hooks = [
    dict(type='EMAHook', ema_type='ExpMomentumEMA', momentum=0.1),
    dict(type='EarlyStoppingHook', monitor='coco/bbox_mAP', min_delta=1.0, patience=5),
    dict(type='Interruptions', moments={moments})]
"""
# Gradients of 3 iterations; checkpoints after 5 and 10 of 12, evaluations after 4, 8 and 12.
BY_ITERATIONS = """
_base_ = ['{base}']
train_dataloader = dict(num_workers={workers}, persistent_workers=bool({workers}))
val_dataloader = dict(dataset=dict(indices=2))
train_cfg = dict(val_interval=4)
optim_wrapper = dict(accumulative_counts=3)
custom_hooks = [dict(type='Interruptions', moments={moments})]
"""


def run(
    template: str, base: Path, moments: list, workers: int = 0, resume: bool = False
) -> list[int]:
    """The exit statuses of a training in the folder `work` and of its resumptions."""
    text = template.format(base=base, moments=moments, workers=workers)
    Path('interrupted.py').write_text(text)
    command = ['interrupted.py', '--work-dir', 'work', *['--resume'] * resume]
    statuses = []
    while not statuses or statuses[-1] in (75, 130) and len(statuses) < 9:
        statuses.append(train.main(command))
        command = [*command[:3], '--resume']
        clear_global_instances()
    return statuses


def contents(path: Path) -> dict:
    """What of a checkpoint a training depends on, or a user reads."""
    checkpoint = torch.load(path, weights_only=False)
    hub = checkpoint['message_hub']['runtime_info']
    kept = {k: v for k, v in hub.items() if k in ('best_score', 'best_ckpt', 'StoppingHook')}
    names = 'state_dict', 'ema_state_dict', 'optimizer', 'param_schedulers', 'gradients'
    logs = checkpoint['message_hub']['log_scalars']
    kept['best_ckpt'] = Path(kept.get('best_ckpt', '')).name
    kept['losses'] = torch.from_numpy(logs['train/loss'].data[0])
    return kept | {name: checkpoint[name] for name in names if name in checkpoint}


@pytest.fixture(scope='module')
def whole(configs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of trainings that nothing interrupts."""
    folders = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, template in (('detector', BY_EPOCHS), ('segmentor', BY_ITERATIONS)):
            patch.chdir(tmp_path_factory.mktemp(name))
            assert run(template, configs[name], []) == [0]
            folders[name] = Path('work').absolute()
        patch.chdir(tmp_path_factory.mktemp('two'))
        assert [status for status, _ in in_two(configs['detector'], [])] == [0, 0]
        folders['two'] = Path('work').absolute()
    return folders


def test_epochs(configs, whole, capsys):
    """The last iteration of an epoch, an evaluation, an iteration, and while writing."""
    moments = [
        ('iteration', 3, TERM),
        ('evaluation', 3, USR1),
        ('iteration', 5, USR1),
        ('checkpoint', 6, TERM),
        ('evaluation', 9, 0),
    ]
    statuses = run(BY_EPOCHS, configs['detector'], moments, workers=1)
    assert statuses == [75, 75, 75, 75, 130, 0]
    said = re.findall(
        r'^cpvt train: (\w+) received; .* iteration (\d)', capsys.readouterr().err, re.M
    )
    assert said == [('SIGTERM', '3'), ('SIGUSR1', '3'), ('SIGUSR1', '5'), ('SIGTERM', '6')]
    names = sorted(path.name for path in Path('work').glob('*.pth'))
    assert names == sorted(path.name for path in whole['detector'].glob('*.pth'))
    assert len(names) == 2 and names[1] == 'epoch_3.pth'
    assert names[0].startswith('best_coco_bbox_mAP_epoch_')
    for name in names:
        assert_same(contents(Path('work', name)), contents(whole['detector'] / name))
    assert Path('work/last_checkpoint').read_text().endswith('epoch_3.pth')


def test_iterations(configs, whole):
    """While gradients are accumulated; after a checkpoint that holds some; in an evaluation."""
    moments = [('iteration', 1, TERM), ('iteration', 7, 0), ('evaluation', 8, TERM)]
    assert run(BY_ITERATIONS, configs['segmentor'], moments) == [75, 130, 75, 0]
    for name in ('iter_10.pth', 'iter_12.pth'):
        ours = contents(Path('work', name))
        assert_same(ours, contents(whole['segmentor'] / name))
        assert ('gradients' in ours) == (name == 'iter_10.pth')


@pytest.mark.parametrize(
    'name, template, moments, torn, left, last',
    [
        ('detector', BY_EPOCHS, [], 'epoch_2.pth', 'epoch_1.pth', 'epoch_3.pth'),
        ('segmentor', BY_ITERATIONS, [('iteration', 8, 9)], None, 'iter_5.pth', 'iter_12.pth'),
    ],
)
def test_killed(configs, whole, name, template, moments, torn, left, last):
    """While writing a checkpoint, of which one is kept; or after 8 of 12 iterations. The references
    have no data workers."""
    write_bytes = Path.write_bytes

    def tear(self: Path, content: bytes) -> int:
        if torn and torn in self.name:
            write_bytes(self, content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return write_bytes(self, content)

    def work(rank: int) -> int:
        with mock.patch.object(Path, 'write_bytes', tear):
            return run(template, configs[name], moments, workers=2)[-1]

    ((status, said),) = in_processes(1, work)
    assert status == -signal.SIGKILL, said
    assert [path.name for path in Path('work').glob(f'{left[:4]}*.pth')] == [left]
    assert run(template, configs[name], [], workers=2, resume=True) == [0]
    assert_same(contents(Path('work', last)), contents(whole[name] / last))
    assert not list(Path('work').rglob('*partial*'))


def test_last_checkpoint_is_the_last_complete_one(tmp_path, whole):
    checkpoint = torch.load(whole['detector'] / 'epoch_3.pth', weights_only=False)
    for epoch, second in ((1, 10), (10, 12), (2, 14), (9, 15)):  # 2: trained again, from 1
        checkpoint['meta'] |= {'iter': 4 * epoch, 'time': f'20260101_0000{second}'}
        torch.save(checkpoint, tmp_path / f'epoch_{epoch}.pth')
    os.truncate(tmp_path / 'epoch_9.pth', 20_000_000)
    torch.save({'state_dict': {}, 'meta': checkpoint['meta']}, tmp_path / 'best_epoch_11.pth')
    (tmp_path / 'last_checkpoint').write_text('')  # torn, too
    assert last_checkpoint(tmp_path).name == 'epoch_2.pth'


def test_resume_keeps_a_seed_that_the_config_leaves_open(whole, tmp_path):
    cfg = Config({'randomness': {'deterministic': True}})
    apply(cfg, plan_start(cfg, find_start(cfg, whole['detector'], True)))
    assert cfg.randomness == {'deterministic': True, 'seed': 3}
    assert cfg.resume and cfg.load_from == str(whole['detector'] / 'epoch_3.pth')
    cfg = Config({'resume': True})
    start = find_start(cfg, tmp_path, False)
    assert start is None
    apply(cfg, plan_start(cfg, start))
    assert not cfg.resume

    cfg = Config.fromfile(whole['detector'] / 'interrupted.py')  # as mmengine wrote it
    text = cfg.pretty_text
    assert text.count('Seeded') == 2 and text.count("'SeedHook'") == 1
    assert resume.plan_resuming(cfg) == []


@pytest.mark.parametrize(
    'cause, status, said',
    [
        ('signal', 143, 'cpvt train: terminated; '),
        ('full disk', 2, 'work/preempted.pth; '),
    ],
)
def test_stopping_fails(cause, status, said, configs, monkeypatch, capsys):
    """A second signal while the checkpoint is written, after it was checked that both are not one
    signal that was delivered twice; a full disk."""
    write_bytes = Path.write_bytes

    def fail(self: Path, content: bytes) -> int:
        if cause == 'full disk':
            raise OSError(errno.ENOSPC, 'No space left on device')
        write_bytes(self, content[: len(content) // 2])
        os.kill(os.getpid(), signal.SIGTERM)  # is taken for the same
        monkeypatch.setattr(preemption, 'TOGETHER', -1)
        os.kill(os.getpid(), signal.SIGUSR1)
        raise AssertionError('goes on')

    monkeypatch.setattr(Path, 'write_bytes', fail)
    assert run(BY_ITERATIONS, configs['segmentor'], [('iteration', 1, 10)]) == [status]
    errors = capsys.readouterr().err
    assert errors.endswith(f'{said}continue with the same command and --resume\n')
    assert not [path for path in Path('work').rglob('*') if 'preempted' in path.name]


def test_stopping_early(tmp_path):
    """The count is in checkpoints; which metric is followed, is found in the first evaluation."""
    hub = MessageHub('here')
    loop = SimpleNamespace(stop_training=False)
    runner = SimpleNamespace(message_hub=hub, train_loop=loop, logger=mock.Mock())
    hook = resume.StoppingHook(patience=2, min_delta=1e-9)
    for value in (0.1, 0.2, 0.2):
        hook.after_val_epoch(runner, {'aAcc': 1.0, 'mIoU': value})
    assert not loop.stop_training
    resumed = resume.StoppingHook(patience=2, min_delta=1e-9)
    resumed.before_train(runner)
    resumed.after_val_epoch(runner, {'aAcc': 2.0, 'mIoU': 0.19})
    assert loop.stop_training
    loop.stop_training = False
    resume.StoppingHook(patience=2).before_train(runner)
    assert loop.stop_training


@pytest.mark.parametrize(
    'main, metrics',
    [
        ('coco_panoptic/PQ', ('coco_panoptic/SQ', 'coco_panoptic/PQ', 'coco/segm_mAP')),
        ('mDice', ('aAcc', 'mDice', 'mAcc')),
        (None, ('strange', 'b')),
    ],
)
def test_the_best_checkpoint_is_by_the_main_metric(main, metrics, tmp_path):
    """Without one that is known there is none, and no error: configs do not ask for one."""
    runner = mock.Mock(epoch=1, iter=2, message_hub=MessageHub('here'))
    hook = resume.WholeCheckpointHook(by_epoch=False)
    hook.out_dir, hook.file_backend = str(tmp_path), resume.AtomicBackend()
    hook._save_best_checkpoint(runner, dict.fromkeys(metrics, 1.0))
    saved = [call.kwargs['filename'] for call in runner.save_checkpoint.mock_calls]
    assert saved == ([f'best_{main.replace("/", "_")}_iter_2.pth'] if main else [])


TWO_PROCESSES = """
_base_ = ['{base}']
train_cfg = dict(max_epochs=2)
train_dataloader = dict(batch_size=1)
val_cfg = val_dataloader = val_evaluator = None
custom_hooks = [dict(type='Interruptions', moments={moments})]
"""


def in_two(base: Path, moments: list, *options: str) -> list[tuple[int, str]]:
    """Exit status and stderr of a training in two processes, of which the second has
    interruptions, in the folder `work`."""
    load_config(base)  # imports mm once, and not in each process

    def work(rank: int) -> int:
        Path(f'process{rank}').mkdir(exist_ok=True)
        os.chdir(f'process{rank}')  # each has its own config and log of interruptions
        Path('two.py').write_text(TWO_PROCESSES.format(base=base, moments=moments if rank else []))
        command = ['two.py', '--launcher', 'pytorch', '--work-dir', str(Path('../work').resolve())]
        return train.main([*command, *options])

    return in_processes(2, work)


@pytest.mark.parametrize('wrapper', ['MMDistributedDataParallel', 'ShardedDataParallel'])
def test_two_processes(configs, whole, capsys, wrapper):
    """A signal to the second process in mid-epoch stops both. One process cannot go on, but it can
    after an epoch, also where the parameters were divided."""
    arguments = configs['detector'], [('iteration', 2, TERM)]
    options = ['--cfg-options', f'model_wrapper_cfg.type={wrapper}']
    (status, line), (other_status, silent) = in_two(*arguments, *options)
    assert (status, other_status) == (75, 75) and silent == ''
    saved = Path('work/preempted.pth').absolute()
    stopped = f'cpvt train: SIGTERM received; {saved} is the state after iteration 2: '
    assert f'{stopped}continue with the same command and --resume\n' in line
    command = ['process0/two.py', '--work-dir', 'work', '--resume']
    assert train.main(command) == 2
    expected = 'the checkpoint was written in mid-epoch with processes: 2, images of each: 1'
    assert expected in capsys.readouterr().err
    assert [status for status, _ in in_two(*arguments, '--resume', *options)] == [0, 0]
    ours, theirs = contents(Path('work/epoch_2.pth')), contents(whole['two'] / 'epoch_2.pth')
    if wrapper == 'MMDistributedDataParallel':
        assert_same(ours, theirs)
    else:  # sums of gradients are rounded in another order
        torch.testing.assert_close(ours['state_dict'], theirs['state_dict'], rtol=1e-4, atol=1e-5)
    clear_global_instances()
    assert train.main([*command, '--cfg-options', 'train_cfg.max_epochs=2']) == 0
    assert 'trained so far with processes: 2' in capsys.readouterr().out
