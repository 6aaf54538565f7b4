"""Trainings that are stopped or killed, and go on."""

import errno
import multiprocessing
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from mmengine.config import Config
from support import ORIGINAL_MM, assert_same, clear_global_instances, in_processes, load_tool
from tiny_mm import SMALL, contents

from cpvt_pyramid.app.config.load import load_config
from cpvt_pyramid.app.training import hooks
from cpvt_pyramid.app.training.hooks import StopOnSignalHook
from cpvt_pyramid.app.training.start import find_start, last_checkpoint, resume_from

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
custom_hooks = [
    dict(type='EMAHook', ema_type='ExpMomentumEMA', momentum=0.1),
    dict(type='Interruptions', moments={moments})]
"""
# Checkpoints after 5 and 10 of 12 iterations, evaluations after 4, 8 and 12.
BY_ITERATIONS = """
_base_ = ['{base}']
train_dataloader = dict(num_workers={workers}, persistent_workers=bool({workers}))
val_dataloader = dict(dataset=dict(indices=2))
train_cfg = dict(val_interval=4)
custom_hooks = [dict(type='Interruptions', moments={moments})]
"""


def run(
    template: str, base: Path, moments: list, workers: int = 0, resume: bool = False
) -> list[int]:
    """The exit statuses of a training in the folder `work` and of its resumptions."""
    text = template.format(base=base, moments=moments, workers=workers) + SMALL
    Path('interrupted.py').write_text(text)
    command = ['interrupted.py', '--work-dir', 'work', *['--resume'] * resume]
    statuses = []
    while not statuses or statuses[-1] in (75, 130) and len(statuses) < 9:
        statuses.append(train.main(command))
        command = [*command[:3], '--resume']
        clear_global_instances()
    return statuses


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


def test_stopped_at_the_ends_of_epochs(configs, whole, capsys):
    """In the last iteration of an epoch, in an evaluation, while a checkpoint is written, and in
    the last evaluation."""
    moments = [
        ('iteration', 3, TERM),
        ('evaluation', 3, USR1),
        ('checkpoint', 6, TERM),
        ('evaluation', 9, 0),
    ]
    assert run(BY_EPOCHS, configs['detector'], moments) == [75, 75, 75, 130, 0]
    said = re.findall(
        r'^cpvt train: (\w+) received; .* iteration (\d)', capsys.readouterr().err, re.M
    )
    assert said == [('SIGTERM', '3'), ('SIGUSR1', '3'), ('SIGTERM', '6')]
    names = sorted(path.name for path in Path('work').glob('*.pth'))
    assert names == sorted(path.name for path in whole['detector'].glob('*.pth'))
    assert len(names) == 3 and names[1:] == ['epoch_2.pth', 'epoch_3.pth']
    assert names[0].startswith('best_coco_bbox_mAP_epoch_')
    for name in (names[0], 'epoch_3.pth'):
        assert_same(contents(Path('work', name)), contents(whole['detector'] / name))
    assert Path('work/last_checkpoint').read_text().endswith('epoch_3.pth')


def test_stopped_within_an_epoch(configs, whole):
    """Twice, then killed: it continues with the next batch, as if nothing had happened."""
    moments = [('iteration', 1, USR1), ('iteration', 5, TERM), ('iteration', 8, 0)]
    assert run(BY_EPOCHS, configs['detector'], moments) == [75, 75, 130, 0]
    assert_same(contents(Path('work/epoch_3.pth')), contents(whole['detector'] / 'epoch_3.pth'))
    assert not Path('work/preempted.pth').exists()


def test_stopped_within_an_epoch_with_a_data_worker(configs, whole):
    """It gets the signal, too."""
    assert run(BY_EPOCHS, configs['detector'], [('iteration', 5, USR1)], workers=1) == [75, 0]
    ours = torch.load('work/epoch_3.pth', weights_only=False)
    theirs = torch.load(whole['detector'] / 'epoch_3.pth', weights_only=False)
    assert ours['meta']['epoch'] == 3 and ours['meta']['iter'] == theirs['meta']['iter'] == 9
    assert_same(ours['param_schedulers'], theirs['param_schedulers'])


def assert_same_if_iterations_are_skipped(ours: Path, theirs: Path) -> None:
    """The original mmengine loads the images of the iterations that it skips, with their
    augmentations; the maintained one does not."""
    if not ORIGINAL_MM:
        assert_same(contents(ours), contents(theirs))


def test_iterations(configs, whole):
    """After an iteration, and in an evaluation."""
    moments = [('iteration', 1, TERM), ('evaluation', 8, TERM)]
    assert run(BY_ITERATIONS, configs['segmentor'], moments) == [75, 75, 0]
    for name in ('iter_10.pth', 'iter_12.pth'):
        assert_same_if_iterations_are_skipped(Path('work', name), whole['segmentor'] / name)


@pytest.mark.parametrize(
    'name, template, moments, torn, left, last',
    [
        ('detector', BY_EPOCHS, [], 'epoch_2.pth', 'epoch_1.pth', 'epoch_3.pth'),
        ('segmentor', BY_ITERATIONS, [('iteration', 8, 9)], None, 'iter_5.pth', 'iter_12.pth'),
    ],
)
def test_killed(configs, whole, name, template, moments, torn, left, last):
    """While writing a checkpoint; or after 8 of 12 iterations."""
    write_bytes = Path.write_bytes

    def tear(self: Path, content: bytes) -> int:
        if torn and torn in self.name:
            write_bytes(self, content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return write_bytes(self, content)

    def work(rank: int) -> int:
        with mock.patch.object(Path, 'write_bytes', tear):
            return run(template, configs[name], moments)[-1]

    ((status, said),) = in_processes(1, work)
    assert status == -signal.SIGKILL, said
    assert [path.name for path in Path('work').glob(f'{left[:4]}*.pth')] == [left]
    assert run(template, configs[name], [], resume=True) == [0]
    if name == 'detector':
        assert_same(contents(Path('work', last)), contents(whole[name] / last))
    else:
        assert_same_if_iterations_are_skipped(Path('work', last), whole[name] / last)
    assert not list(Path('work').rglob('*partial*'))


def test_last_checkpoint_is_the_last_complete_one(tmp_path, whole):
    """Whatever local time says, which goes back with its zone and in autumn."""
    checkpoint = torch.load(whole['detector'] / 'epoch_3.pth', weights_only=False)
    for number, (epoch, second) in enumerate([(1, 50), (10, 59), (2, 14), (9, 15)]):
        checkpoint['meta'] |= {'iter': 4 * epoch, 'time': f'20260101_0000{second}'}
        torch.save(checkpoint, tmp_path / f'epoch_{epoch}.pth')
        os.utime(tmp_path / f'epoch_{epoch}.pth', (number, number))
    os.truncate(tmp_path / 'epoch_9.pth', 20_000)
    torch.save({'state_dict': {}, 'meta': checkpoint['meta']}, tmp_path / 'best_epoch_11.pth')
    assert last_checkpoint(tmp_path).name == 'epoch_2.pth'  # trained again, from 1
    for text, expected in (
        ('', 'epoch_2'),  # truncated
        ('elsewhere/epoch_1.pth', 'epoch_1'),  # the folder was moved
        ('elsewhere/epoch_9.pth', 'epoch_2'),
        ('elsewhere/epoch_7.pth', 'epoch_2'),
        (str(whole['detector'] / 'epoch_3.pth'), 'epoch_2'),  # of another folder
    ):
        (tmp_path / 'last_checkpoint').write_text(text)
        assert last_checkpoint(tmp_path).stem == expected


def test_resume_keeps_a_seed_that_the_config_leaves_open(whole, tmp_path):
    cfg = load_config(whole['detector'] / 'interrupted.py')  # as mmengine wrote it
    cfg.randomness = {'deterministic': True}
    resume_from(cfg, find_start(cfg, whole['detector'], True))
    assert cfg.randomness == {'deterministic': True, 'seed': 3}
    assert cfg.resume and cfg.load_from == str(whole['detector'] / 'epoch_3.pth')
    cfg = Config({'resume': True})
    start = find_start(cfg, tmp_path, False)
    assert start is None
    resume_from(cfg, start)
    assert not cfg.resume


@pytest.mark.parametrize(
    'options, complaint',
    [
        (['optim_wrapper.optimizer.lr=1e-2'], 'optim_wrapper.optimizer'),
        (['param_scheduler.0.milestones=[1]'], 'param_scheduler'),
        (['param_scheduler.0.type=StepLR'], 'param_scheduler'),
        (['param_scheduler.0.end=9'], 'param_scheduler'),
        (['auto_scale_lr.enable=True'], 'auto_scale_lr.enable'),
        (['train_cfg.max_epochs=4'], 'train_cfg.max_epochs'),
        (['train_dataloader.num_workers=1'], ''),  # is used
    ],
)
def test_a_resumed_training_is_that_of_the_config(options: Sequence[str], complaint, whole):
    """The checkpoint restores the optimizer and the schedule, whatever the config says."""
    cfg = load_config(whole['detector'] / 'interrupted.py', options)
    start = find_start(cfg, whole['detector'], True)
    if not complaint:
        resume_from(cfg, start)
        return
    with pytest.raises(Exception) as raised:
        resume_from(cfg, start)
    line = str(raised.value)
    assert f'cannot be resumed exactly: the config has another {complaint}. Resume' in line
    assert 'load_from=' in line and '\n' not in line


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
        if 'preempted' not in self.name:
            return write_bytes(self, content)
        if cause == 'full disk':
            raise OSError(errno.ENOSPC, 'No space left on device')
        write_bytes(self, content[: len(content) // 2])
        os.kill(os.getpid(), signal.SIGTERM)  # is taken for the same
        monkeypatch.setattr('cpvt_pyramid.app.training.hooks.TOGETHER', -1)
        os.kill(os.getpid(), signal.SIGUSR1)
        raise AssertionError('goes on')

    monkeypatch.setattr(Path, 'write_bytes', fail)
    assert run(BY_ITERATIONS, configs['segmentor'], [('iteration', 1, 10)]) == [status]
    errors = capsys.readouterr().err
    assert errors.endswith(f'{said}continue with the same command and --resume\n')
    assert not [path for path in Path('work').rglob('*') if 'preempted' in path.name]


def test_a_signal_to_data_workers(configs, monkeypatch, capsys):
    """Clusters send it to all processes of a job. By PyTorch's handler a worker that gets it from
    another process than its parent ends at once, and the training with an error."""
    kill = os.kill
    others = multiprocessing.active_children()  # of trainings of other tests
    told = []

    def kill_all(pid: int, number: int) -> None:
        for worker in set(multiprocessing.active_children()) - set(others):
            told.append(worker)
            subprocess.run(['kill', f'-{number}', str(worker.pid)], check=True)
        time.sleep(0.5)
        kill(pid, number)

    monkeypatch.setattr(os, 'kill', kill_all)
    monkeypatch.setattr(hooks, 'PATIENCE', 5)
    assert run(BY_EPOCHS, configs['detector'], [('iteration', 2, TERM)], workers=1) == [75, 0]
    assert 'SIGTERM received' in capsys.readouterr().err
    for worker in told:  # in the end they end, whatever the training's process does at an alarm
        worker.join(20)
    assert told and {worker.exitcode for worker in told} == {0}


def test_a_platform_without_sigusr1(monkeypatch):
    """Windows has none."""
    monkeypatch.delattr(signal, 'SIGUSR1')
    assert StopOnSignalHook().signals == [signal.SIGTERM]


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


def test_two_processes(configs, whole):
    """A signal to the second process, in the last iteration of an epoch, stops both."""
    arguments = configs['detector'], [('iteration', 4, TERM)]
    (status, line), (other_status, silent) = in_two(*arguments)
    assert (status, other_status) == (75, 75) and silent == ''
    saved = Path('work/preempted.pth').absolute()
    stopped = f'cpvt train: SIGTERM received; {saved} resumes after iteration 4: '
    assert f'{stopped}continue with the same command and --resume\n' in line
    assert [status for status, _ in in_two(*arguments, '--resume')] == [0, 0]
    assert_same(contents(Path('work/epoch_2.pth')), contents(whole['two'] / 'epoch_2.pth'))
