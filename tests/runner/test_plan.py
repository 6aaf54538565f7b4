"""What a training and a test change in a config: planned without a change, applied in one place."""

import copy
from pathlib import Path
from typing import Any

import mmdet
import mmseg
import pytest
from mmengine.config import Config
from support import load_tool

from cpvt_pyramid.config.load import load_config
from cpvt_pyramid.config.plan import (
    PRESENT,
    Action,
    append,
    apply,
    note,
    plan_lines,
    remove,
    set_value,
    wrap,
)
from cpvt_pyramid.runner.evaluation_plan import plan_test
from cpvt_pyramid.runner.training.plan import TrainingOptions, plan_training
from cpvt_pyramid.runner.training.start import Start

train = load_tool('train')
START = Start(Path('epoch_3.pth'), {'meta': {'seed': 7}})
EVERYTHING = TrainingOptions(
    amp=True, early_stop=2, log_to=['tensorboard'], launcher='pytorch', work_dir='work'
)


def frozen(value: Any) -> Any:
    """A copy of a config, also of what is in it."""
    if isinstance(value, dict):
        return {key: frozen(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(frozen, value))
    return value


def config_of(package: Any, name: str) -> Config:
    return load_config(Path(package.__file__).parent / '.mim/configs' / name)


def without_optional(cfg: Config) -> Config:
    """The config without what others leave out or set to None."""
    for name in ('custom_hooks', 'default_hooks', 'visualizer', 'log_processor', 'randomness'):
        cfg[name] = None
    cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    return cfg


@pytest.fixture(
    params=[
        'detector',
        'segmentor',
        'detector without',
        'rtmdet/rtmdet_l_convnext_b_4xb32-100e_coco.py',
        'soft_teacher/soft-teacher_faster-rcnn_r50-caffe_fpn_180k_semi-0.1-coco.py',
        'mmseg: unet/unet-s5-d16_fcn_4xb4-40k_drive-64x64.py',
    ]
)
def cfg(request, configs) -> Config:
    """Ours and others, that count epochs and iterations, with data sets in data sets."""
    kind = request.param
    if kind == 'detector without':
        return without_optional(load_config(configs['detector']))
    if kind in configs:
        return load_config(configs[kind])
    if kind.startswith('mmseg: '):
        return config_of(mmseg, kind.removeprefix('mmseg: '))
    return config_of(mmdet, kind)


def test_planning_changes_nothing_and_a_plan_is_complete(cfg):
    before = frozen(cfg.to_dict())
    plan = plan_training(cfg, EVERYTHING, Path('work'), START, processes=2)
    test_plan = plan_test(cfg, 'a.pth', Path('work'), show_dir='shown', dtype='bfloat16')
    assert cfg.to_dict() == before
    paths = [change.path for change in plan]
    for path in ('work_dir', 'resume', 'load_from', 'train_dataloader.sampler'):
        assert path in paths
    assert all(change.reason for change in (*plan, *test_plan))

    changed = copy.deepcopy(cfg)
    apply(changed, plan)
    assert changed.randomness.seed == 7 and changed.launcher == 'pytorch'
    kinds = [hook.type for hook in changed.custom_hooks]
    assert kinds[-1] == 'ResumeHook' and kinds.count('StoppingHook') == 1
    again = plan_training(changed, EVERYTHING._replace(early_stop=None), Path('work'), START, 2)
    written = {'resume', 'load_from', 'randomness.seed'}  # each time
    rest = [c for c in again if c.action is not Action.NOTE and c.path not in written]
    assert rest == []


def test_actions():
    cfg = Config({'a': {'b': 1, 'c': 2}, 'hooks': ({'type': 'A'},), 'none': None, 'data': {'x': 1}})
    plan = (
        set_value('a.b', {'type': 'B', 'n': [1]}, 'one'),
        set_value('none.of.these', 3, 'two'),
        append('hooks', {'type': 'H'}, 'three'),
        append('backends', {'type': 'V'}, 'four'),
        set_value('hooks.0.type', 'Z', 'five'),
        remove('a.c', 'six'),
        wrap('data', {'type': 'W', 'inner': PRESENT}, 'seven'),
        note('lr', 'eight'),
    )
    apply(cfg, plan)
    assert cfg.to_dict() == {
        'a': {'b': {'type': 'B', 'n': [1]}},
        'hooks': [{'type': 'Z'}, {'type': 'H'}],
        'none': {'of': {'these': 3}},
        'data': {'type': 'W', 'inner': {'x': 1}},
        'backends': [{'type': 'V'}],
    }
    assert cfg.a.b.n == [1] and cfg.data.inner.x == 1  # dicts of a config, at any depth
    assert list(plan_lines(plan, longest=16)) == [
        'a.b = B(n=[1])    # one',
        'none.of.these...  # two',
        'hooks += [H()]    # three',
        'backends += [...  # four',
        'hooks.0.type ...  # five',
        'del a.c           # six',
        'data = W(inne...  # seven',
        '# lr              # eight',
    ]
    assert [line.partition('  ')[0] for line in plan_lines(plan)][1:5] == [
        'none.of.these = 3',
        'hooks += [H()]',
        'backends += [V()]',
        "hooks.0.type = 'Z'",
    ]


def test_a_dry_run_prints_the_plan_and_writes_nothing(configs, capsys):
    command = [str(configs['detector']), '--dry-run', '--early-stop', '2']
    assert train.main(command) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f'changed in {configs["detector"]}:'
    assert lines[0].split() == "work_dir = 'work_dirs/detector' # the config sets none".split()
    assert len({line.index('#') for line in lines}) == 1
    assert any('StoppingHook(patience=2' in line for line in lines)
    assert not list(Path().iterdir())
    assert train.main(['.', '--dry-run']) == 2
    assert '--dry-run needs a config' in capsys.readouterr().err
