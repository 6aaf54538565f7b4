"""Each option in configs/README.md works in a config and on the command line."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from support import ROOT, load_tool

from cpvt_pyramid.runner import tool_runner
from cpvt_pyramid.runner.config.load import load_config

train, test_tool = load_tool('train'), load_tool('test')

ROWS = [
    re.findall(r'`(.*?)`', line)
    for line in (ROOT / 'configs/README.md').read_text().splitlines()
    if line.startswith('| ') and '`optim' in line or '`default_hooks' in line or '`model' in line
]
EMA = next(options for _, options in ROWS if 'EMAHook' in options)


@pytest.fixture
def config(configs: dict[str, Path]) -> Path:
    return configs['detector']


def train_with(config: Path, options: str, *arguments: str, work_dir: str = 'work') -> Path:
    """Train two epochs of one step; returns the work dir."""
    command = [
        str(config),
        '--work-dir',
        work_dir,
        *arguments,
        '--cfg-options',
        'train_cfg.max_epochs=2',
        'train_dataloader.dataset.indices=2',
        *shlex.split(options),
    ]
    assert train.main(command) == 0
    return Path(work_dir)


def test_there_are_options():
    assert len(ROWS) == 4


@pytest.mark.parametrize('line, options', ROWS)
def test_the_config_line_and_the_arguments_agree(line, options, config, tmp_path):
    (tmp_path / 'mine.py').write_text(f"_base_ = '{config}'\n{line}\n")
    by_arguments = load_config(config, shlex.split(options))
    assert Config.fromfile(tmp_path / 'mine.py')._cfg_dict == by_arguments._cfg_dict


@pytest.mark.parametrize('options', [options for _, options in ROWS])
def test_takes_a_step(options, config):
    model = torch.load(train_with(config, options) / 'epoch_2.pth', weights_only=False)
    assert all(tensor.isfinite().all() for tensor in model['state_dict'].values())


def test_average_is_resumed_and_tested(config, monkeypatch):
    options = EMA.replace('2e-4', '0.5')  # so that the two differ after a step or two
    whole = train_with(config, options, work_dir='whole')
    part = train_with(config, options + ' train_cfg.max_epochs=1', work_dir='part')
    train_with(config, options, '--resume', work_dir='part')
    a, b = (torch.load(f / 'epoch_2.pth', weights_only=False) for f in (whole, part))
    for kind in ('state_dict', 'ema_state_dict'):
        assert not [k for k, v in a[kind].items() if not torch.equal(v, b[kind][k])], kind

    average, trained = a['state_dict'], a['ema_state_dict']  # mmengine has swapped them
    assert not torch.equal(
        average['bbox_head.retina_cls.bias'], trained['module.bbox_head.retina_cls.bias']
    )
    tested = {}

    class Spy(tool_runner.ToolRunner):
        def call_hook(self, name: str, **options: object) -> None:
            super().call_hook(name, **options)
            if name == 'before_test_iter':
                tested.update(self.model.state_dict())

    monkeypatch.setattr(tool_runner, 'ToolRunner', Spy)
    command = [str(config), 'whole/epoch_2.pth', '--cfg-options']
    for with_hook in ([], shlex.split(options)):
        tested.clear()
        assert test_tool.main(command + (with_hook or ['log_level=INFO'])) == 0
        assert not [k for k, v in average.items() if not torch.equal(v, tested[k])]
