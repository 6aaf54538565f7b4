"""Trainings that resume with another config than their checkpoint: a change is refused, or said."""

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.evaluator import BaseMetric
from mmengine.registry import METRICS
from support import assert_same, clear_global_instances, in_processes, load_tool
from tiny_mm import SMALL, contents

from cpvt_pyramid.app.config.load import load_config
from cpvt_pyramid.app.config.schedules import check_schedules, schedule_problems
from cpvt_pyramid.app.data.config_data import annotation_file
from cpvt_pyramid.app.tooling.command import UserError
from cpvt_pyramid.app.training.resuming import (
    changed_settings,
    fixed_setting,
)

train = load_tool('train')

# 8 images, no evaluation.
DETECTOR = """
_base_ = ['{base}']
train_dataloader = dict(batch_size={batch})
train_cfg = dict(max_epochs={epochs})
val_cfg = val_dataloader = val_evaluator = None
default_hooks = dict(checkpoint=dict(max_keep_ckpts=9))
"""


def run(text: str, *options: str, folder: str = 'work') -> int:
    Path('mine.py').write_text(text + SMALL)
    status = train.main(['mine.py', '--work-dir', folder, *options])
    clear_global_instances()
    return status


@pytest.fixture
def detector(configs):
    def text(batch: int = 2, epochs: int = 4, more: str = '') -> str:
        values = {'base': configs['detector'], 'batch': batch, 'epochs': epochs}
        return (DETECTOR + more).format(**values)

    return text


ENDS_EARLY = 'PolyLR ends after 8 of 12 iterations, and the learning rate stays'


@pytest.mark.parametrize(
    'loop, schedules, problem',
    [
        (
            'max_epochs=4',
            [dict(type='CosineAnnealingLR', T_max=2)],
            'after 2 of 4 epochs, and the ',
        ),
        ('max_epochs=4', [dict(type='CosineAnnealingLR', T_max=4)], ''),
        ('max_epochs=4', [dict(type='CosineAnnealingLR')], ''),
        ('max_epochs=4', [dict(type='MultiStepLR', milestones=[1], end=3)], 'after 3 of 4 epochs'),
        ('max_epochs=4', [dict(type='MultiStepLR', milestones=[1])], ''),
        # a warm-up, after which the learning rate is constant
        ('max_epochs=4', [dict(type='LinearLR', by_epoch=False, end=5)], ''),
        ('max_epochs=4', dict(type='ReduceOnPlateauLR', monitor='loss'), ''),
        ('max_epochs=4', None, ''),
        ('max_iters=12', [dict(type='PolyLR', by_epoch=False, end=8)], ENDS_EARLY),
        ('max_iters=12', [dict(type='PolyLR', by_epoch=False, begin=2, end=12)], ''),
        (
            'max_iters=12',
            [dict(type='PolyLR', by_epoch=False, end=6), dict(type='StepLR', by_epoch=False)],
            '',
        ),
        ('max_iters=12', [dict(type='CosineAnnealingLR')], 'counts epochs, and the training iter'),
        # of 2 iterations in each epoch
        ('max_epochs=6', [dict(type='PolyLR', by_epoch=False, end=8)], ENDS_EARLY),
        ('max_epochs=4', [dict(type='PolyLR', by_epoch=False, end=8)], ''),
    ],
)
def test_schedules_that_end_early(loop, schedules, problem):
    key, _, value = loop.partition('=')
    cfg = Config({'train_cfg': {key: int(value)}, 'param_scheduler': schedules})
    problems = schedule_problems(cfg, epoch_length=2)
    assert len(problems) == bool(problem)
    assert problem in ''.join(problems)
    check_schedules(cfg)


@pytest.mark.parametrize('kind', ['CosineAnnealingLR', 'PolyLR'])
@pytest.mark.parametrize('lr, eta_min, is_odd', [(1e-4, 2e-4, True), (4e-3, 2e-4, False)])
def test_schedules_that_raise_the_learning_rate(kind, lr, eta_min, is_odd):
    """RTMDet's configs end at 2e-4, which is more than the learning rate of other recipes."""
    cfg = Config(
        dict(
            train_cfg=dict(max_epochs=4),
            optim_wrapper=dict(optimizer=dict(type='AdamW', lr=lr)),
            param_scheduler=[dict(type='LinearLR', end=1), dict(type=kind, eta_min=eta_min)],
        )
    )
    expected = f'{kind} raises the learning rate from 0.0001 to its eta_min of 0.0002: set eta_min'
    problems = schedule_problems(cfg)
    assert [problem.startswith(expected) for problem in problems] == [True] * is_odd
    cfg.param_scheduler[1].eta_min = None
    cfg.param_scheduler[1].eta_min_ratio = 0.05
    cfg.optim_wrapper.optimizer.pop('lr')
    assert schedule_problems(cfg) == []


def test_one_cycle_must_last_as_long_as_the_training():
    schedule = dict(type='OneCycleLR', total_steps=4, convert_to_iter_based=True)
    cfg = Config({'train_cfg': {'max_epochs': 5}, 'param_scheduler': [schedule]})
    with pytest.raises(UserError, match='must have total_steps=5, the epochs of the training, got'):
        check_schedules(cfg)
    cfg.train_cfg.max_epochs = 4
    check_schedules(cfg)


STOP = "dict(type='Interruptions', moments=[('iteration', 5, 15)])"
EMA = "dict(type='EMAHook', momentum=0.1)"


@pytest.fixture(scope='module')
def stopped(configs, tmp_path_factory) -> Path:
    """The folder of a training that was stopped in its second epoch of 4 iterations."""
    folder = tmp_path_factory.mktemp('stopped')
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        text = DETECTOR.format(base=configs['detector'], batch=2, epochs=3)
        assert run(f'{text}custom_hooks = [{STOP}]\n') == 75
    return folder / 'work'


@pytest.mark.parametrize(
    'more, options, problem',
    [
        ('', 'train_cfg.max_epochs=4', 'the config has another train_cfg.max_epochs'),
        (
            '',
            'train_dataloader.batch_size=4 train_cfg.max_epochs=6',
            'another train_cfg.max_epochs, train_dataloader.batch_size',
        ),
        ('', 'optim_wrapper.accumulative_counts=2', 'another optim_wrapper.accumulative_counts'),
        ('', 'param_scheduler.0.milestones=[1]', 'another param_scheduler'),
        ('', 'default_hooks.checkpoint.save_best=x', 'another default_hooks.checkpoint.save_best'),
        ('', 'train_dataloader.dataset.indices=4', 'an epoch has 2 iterations now, and had 4'),
        (f'custom_hooks = [{EMA}, {STOP}]\n', '', 'the EMAHook of the config is new'),
    ],
)
def test_what_cannot_go_on_exactly_is_refused(more, options, problem, stopped, detector, capsys):
    """In one line, and all checkpoints stay as they are."""
    shutil.copytree(stopped, 'work')
    before = {path: path.read_bytes() for path in Path('work').glob('*.pth')}
    more = more or f'custom_hooks = [{STOP}]\n'
    arguments = ['--cfg-options', *options.split()] if options else []
    assert run(detector(2, 3, more), '--resume', *arguments) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert problem in line
    assert line.startswith('cpvt train: work/preempted.pth cannot be resumed exactly: ')
    assert line.endswith('--cfg-options load_from=work/preempted.pth')
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize('is_changed', [False, True])
def test_other_annotations_are_said(is_changed, stopped, detector, capsys):
    """Those of a file that was moved may count as before."""
    shutil.copytree(stopped, 'work')
    cfg = load_config('work/mine.py')
    content = annotation_file(cfg.train_dataloader.dataset).read_text()
    if is_changed:
        content = content.replace('"iscrowd": 0', '"iscrowd": 1', 1)
    Path('moved.json').write_text(content)
    option = f'train_dataloader.dataset.ann_file={os.path.abspath("moved.json")}'
    more = f'custom_hooks = [{STOP}]\n'
    assert run(detector(2, 3, more), '--resume', '--cfg-options', option) == 0
    said = 'files of annotations have changed since the checkpoint: train_dataloader.dataset'
    assert (said in ''.join(capsys.readouterr())) == is_changed


def test_without_the_ema_hook(detector, capsys):
    assert run(detector(4, 1, f'custom_hooks = [{EMA}]\n')) == 0
    assert run(detector(4, 1), '--resume') == 2
    assert 'the EMAHook of the config is missing. Resume with' in capsys.readouterr().err


SEGMENTOR = """
_base_ = ['{base}']
val_dataloader = dict(dataset=dict(indices=1))
"""
EARLY = """
train_cfg = dict(max_iters=30, val_interval=2)
optim_wrapper = dict(optimizer=dict(lr=0.0, weight_decay=0.0))
param_scheduler = [dict(type='PolyLR', power=0.9, by_epoch=False, end=30)]
custom_hooks = [
    dict(type='EarlyStoppingHook', monitor='mIoU', patience=3, min_delta=50),
    dict(type='Interruptions', moments=[('evaluation', 4, 15), ('iteration', 7, 0)])]
"""


def test_early_stopping_goes_on_counting(configs):
    """Stopped in the second evaluation, and killed: it stops where it would have, also when it is
    resumed after that."""
    text = SEGMENTOR.format(base=configs['segmentor']) + EARLY
    statuses = [run(text, '--resume') for _ in range(3)]
    assert statuses == [75, 130, 0]
    last = [int(path.stem.split('_')[-1]) for path in Path('work').glob('*_*.pth')]
    assert max(last) <= 8
    before = sorted(Path('work').glob('*.pth'))
    assert run(text, '--resume') == 0
    assert sorted(Path('work').glob('*.pth')) == before


SUMS = """
train_cfg = dict(max_iters=9, val_interval=3)
optim_wrapper = dict(accumulative_counts=4)
custom_hooks = [dict(type='Interruptions', moments={moments})]
"""


def test_a_training_stops_at_an_update(configs):
    """Stopped within a sum of gradients, which it completes first."""
    text = SEGMENTOR.format(base=configs['segmentor']) + SUMS
    assert run(text.format(moments=[]), folder='whole') == 0
    text = text.format(moments=[('iteration', 2, 15)])
    assert run(text) == 75
    assert torch.load('work/preempted.pth', weights_only=False)['meta']['iter'] == 4
    assert run(text, '--resume') == 0
    assert_same(contents(Path('work/iter_9.pth')), contents(Path('whole/iter_9.pth')))


def test_a_checkpoint_within_a_sum_of_gradients(configs, capsys):
    """mmengine says what is lost."""
    text = SEGMENTOR.format(base=configs['segmentor']) + SUMS
    assert run(text.format(moments=[('iteration', 7, 0)])) == 130
    capsys.readouterr()
    assert run(text.format(moments=[('iteration', 7, 0)]), '--resume') == 0
    assert 'gradient of some iterations is lost' in ''.join(capsys.readouterr())


def test_two_processes_stop_at_an_update(configs):
    """Each has a sum of its own, and one is written."""
    text = SEGMENTOR.format(base=configs['segmentor']) + SUMS + SMALL
    Path('sums.py').write_text(text.format(moments=[('iteration', 2, 15)]))
    load_config('sums.py')  # imports mm once, and not in each process

    def work(rank: int) -> int:
        return train.main(['sums.py', '--work-dir', 'work', '--launcher', 'pytorch'])

    assert [status for status, _ in in_processes(2, work)] == [75, 75]
    assert torch.load('work/preempted.pth', weights_only=False)['meta']['iter'] == 4


def test_the_saved_config_is_the_own_one(detector, capsys):
    """It starts another training, elsewhere."""
    assert run(detector(4, 1)) == 0
    assert run(detector(4, 1), '--resume', '--cfg-options', 'find_unused_parameters=True') == 0
    saved = Config.fromfile('work/mine.py', import_custom_modules=False)
    assert not saved.resume and saved.load_from is None
    assert saved.find_unused_parameters
    assert train.main(['work/mine.py', '--work-dir', 'again']) == 0


def test_configs_in_the_work_dir_are_not_replaced(detector, capsys):
    """Neither the config itself, nor that of a run before with other options."""
    text = detector(4, 1)
    assert run(text, folder='.') == 0
    assert Path('mine.py').read_text() == text + SMALL
    assert 'mine.py stays as it is' in capsys.readouterr().out
    Path('other').mkdir()
    Path('other/mine.py').write_text('edited by hand')
    assert run(text, folder='other') == 0
    assert Path('other/former_mine.py').read_text() == 'edited by hand'
    assert run(text, '--resume', folder='other') == 0
    assert not Path('other/former_former_mine.py').exists()


def test_another_seed_is_told(detector, capsys):
    assert run(detector(4, 1)) == 0
    assert run(detector(4, 1), '--resume', '--cfg-options', 'randomness.seed=5') == 0
    assert 'the seed is that of the checkpoint, 3, and not 5' in capsys.readouterr().out


def test_another_number_of_processes(configs, capfd):
    text = DETECTOR.format(base=configs['detector'], batch=1, epochs=2)
    text += "custom_hooks = [dict(type='Interruptions', moments=[('iteration', 4, 15)])]\n"
    Path('mine.py').write_text(text + SMALL)
    load_config('mine.py')  # imports mm once, and not in each process

    def work(rank: int) -> int:
        return train.main(['mine.py', '--work-dir', 'work', '--launcher', 'pytorch'])

    assert [status for status, _ in in_processes(2, work)] == [75, 75]
    # Of half the images, so that an epoch is as long.
    options = '--cfg-options', 'train_dataloader.dataset.indices=4'
    assert train.main(['mine.py', '--work-dir', 'work', '--resume', *options]) == 2
    assert 'cannot be resumed exactly: 1 process instead of 2. Resume' in capfd.readouterr().err


def test_check_data_tells_of_a_schedule_that_ends_early(detector, capsys):
    cosine = "param_scheduler = [dict(type='CosineAnnealingLR', by_epoch=True, T_max=2)]\n"
    Path('mine.py').write_text(detector(2, 4, cosine))
    assert load_tool('check_data').main(['mine.py', '--splits', 'train']) == 0
    assert 'CosineAnnealingLR ends after 2 of 4 epochs, and the learning' in capsys.readouterr().out


IMPROVES = """
val_evaluator = [dict(type='Improving')]
default_hooks = dict(checkpoint=dict(save_best='score', rule='greater'))
train_cfg = dict(max_iters=4, val_interval=2)
custom_hooks = [dict(type='Interruptions', moments=[('iteration', 3, 15)])]
"""


@METRICS.register_module()
class Improving(BaseMetric):
    """Is better in each evaluation."""

    evaluations = 0

    def process(self, data_batch, data_samples):
        self.results.append(1)

    def compute_metrics(self, results):
        Improving.evaluations += 1
        return {'score': Improving.evaluations}


@pytest.mark.parametrize('how', ['a copy', 'a checkpoint'])
def test_the_best_checkpoint_of_another_work_dir_stays(how, configs):
    """mmengine deletes the previous one at its path, when there is a better one."""
    text = SEGMENTOR.format(base=configs['segmentor']) + IMPROVES
    assert run(text) == 75
    resume = '--resume=work/preempted.pth'
    if how == 'a copy':
        shutil.copytree('work', 'other')
        resume = '--resume'
    assert run(text, resume, folder='other') == 0
    assert Path('work/best_score_iter_2.pth').exists()
    best = [path.name for path in Path('other').glob('best_*.pth')]
    assert best == ['best_score_iter_4.pth']


@pytest.mark.parametrize(
    ('path', 'value', 'is_fixed'),
    [
        ('compile', {'dynamic': False}, False),
        ('custom_imports.imports', [], False),
        ('find_unused_parameters', True, False),
        ('model_wrapper_cfg', {'type': 'MMFullyShardedDataParallel'}, False),
        ('randomness.deterministic', True, False),
        ('sync_bn', 'mmcv', False),
        ('train_dataloader.batch_size', 7, True),
        ('train_dataloader.num_workers', 7, False),
        ('val_cfg.fp16', True, True),
        ('val_dataloader.dataset.data_prefix.img_path', 'elsewhere', False),
        ('val_evaluator.iou_metrics', ['mDice'], True),
        ('val_evaluator.ann_file', 'elsewhere', False),
        ('default_hooks.checkpoint.rule', 'less', True),
        ('default_hooks.checkpoint.interval', 7, False),
        ('model.test_cfg.mode', 'slide', False),
        ('of_my_hook', 3, False),
    ],
)
def test_all_settings_are_compared(path, value, is_fixed, configs):
    before = Config.fromfile(configs['segmentor'], import_custom_modules=False)
    changed = Config.fromfile(configs['segmentor'], import_custom_modules=False)
    changed.merge_from_dict({path: value})
    checkpoint = {'meta': {'cfg': before.pretty_text}}
    assert changed_settings(before, checkpoint, 'x.pth') == {}
    found = changed_settings(changed, checkpoint, 'x.pth')
    assert found and all(key.startswith(path) for key in found)
    assert any(map(fixed_setting, found)) == is_fixed


def test_what_a_resumed_training_may_change_without_a_word(configs):
    """And a variable, whose change is said where it is used."""
    before = Config.fromfile(configs['segmentor'], import_custom_modules=False)
    changed = Config.fromfile(configs['segmentor'], import_custom_modules=False)
    changed.merge_from_dict(
        {
            'work_dir': 'elsewhere',
            'test_dataloader.batch_size': 9,
            'randomness.seed': 9,
            'of_two': {'scale': (3, 4)},
            'train_dataloader.dataset.pipeline.2.scale': (3, 4),
        }
    )
    found = changed_settings(changed, {'meta': {'cfg': before.pretty_text}}, 'x.pth')
    assert [*found] == ['train_dataloader.dataset.pipeline.2.scale', 'of_two.scale']


def test_checkpoints_in_a_folder_of_their_own(detector, capsys):
    own = "default_hooks['checkpoint']['out_dir'] = 'checkpoints'\n"
    own += "custom_hooks = [dict(type='Interruptions', moments=[('iteration', 3, 0)])]\n"
    assert run(detector(4, 2, own)) == 130
    assert Path('checkpoints/work/epoch_1.pth').exists()
    assert run(detector(4, 2, own)) == 2  # it needs --resume
    assert 'checkpoints/work already has checkpoints' in capsys.readouterr().err
    assert run(detector(4, 2, own), '--resume') == 0
    assert re.findall(r'Epoch\(train\) \[(\d)\]', capsys.readouterr().out)[-2:] == ['2', '2']
    assert Path('checkpoints/work/epoch_2.pth').exists()


@pytest.mark.parametrize(
    'old, new, said',
    [
        ('cpvt_pyramid.app', 'a_module_of_before', 'optim_wrapper.optimizer'),
        ('lr=0.001', 'lr=inf', 'are not compared with those before: '),
    ],
)
def test_a_checkpoint_whose_config_names_other_modules_or_is_not_readable(
    old, new, said, detector, capsys
):
    assert run(detector(4, 1)) == 0
    checkpoint = torch.load('work/epoch_1.pth', weights_only=False)
    text = checkpoint['meta']['cfg']
    assert old in text
    checkpoint['meta']['cfg'] = text.replace(old, new)
    torch.save(checkpoint, 'work/epoch_1.pth')
    changed = '--cfg-options', 'optim_wrapper.optimizer.lr=0.002'
    is_compared = said == 'optim_wrapper.optimizer'
    assert run(detector(4, 1), '--resume', *changed) == (2 if is_compared else 0)
    assert said in ''.join(capsys.readouterr())


def test_epochs_with_fewer_batches_than_their_sampler_says(detector, capsys):
    """As those of AspectRatioBatchSampler with `drop_last`, of 1 batch instead of 2."""
    short = (
        "train_dataloader['batch_sampler'] = dict(\n"
        "    _delete_=True, type='AspectRatioBatchSampler', drop_last=True)\n"
    )
    assert run(detector(4, 3, short), folder='whole') == 0
    assert run(detector(4, 3, short), '--resume=whole/epoch_1.pth', folder='other') == 0
    said = capsys.readouterr().out
    assert 'continuing' not in said and 'the schedules differ' not in said
    whole, other = (contents(Path(folder, 'epoch_3.pth')) for folder in ('whole', 'other'))
    assert_same(other, whole)
