"""Each option in configs/README.md works in a config and on the command line."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from support import ROOT, load_tool

from cpvt_pyramid.app.config.load import load_config
from cpvt_pyramid.app.training import test as testing

train, test_tool = load_tool('train'), load_tool('test')

ROWS = [
    re.findall(r'`(.*?)`', line)
    for line in (ROOT / 'configs/README.md').read_text().splitlines()
    if line.startswith('| ') and '`optim' in line or '`default_hooks' in line or '`model' in line
]
EMA = next(options for _, options in ROWS if 'EMAHook' in options)


def train_with(config: Path, options: str) -> Path:
    """Train two epochs of one step; returns the work dir."""
    command = [str(config), '--work-dir', 'work', '--cfg-options', 'train_cfg.max_epochs=2']
    assert train.main([*command, 'train_dataloader.dataset.indices=2', *shlex.split(options)]) == 0
    return Path('work')


@pytest.mark.parametrize('line, options', ROWS)
def test_the_config_line_and_the_arguments_agree_and_train(line, options, configs):
    assert len(ROWS) == 4
    Path('mine.py').write_text(f"_base_ = '{configs['detector']}'\n{line}\n")
    by_arguments = load_config(configs['detector'], shlex.split(options))
    assert Config.fromfile('mine.py')._cfg_dict == by_arguments._cfg_dict
    work_dir = train_with(configs['detector'], options)
    model = torch.load(work_dir / 'epoch_2.pth', weights_only=False)
    assert all(tensor.isfinite().all() for tensor in model['state_dict'].values())


def test_the_average_is_tested(configs, monkeypatch):
    """That a training resumes it is tested in test_resume.py."""
    config = configs['detector']
    options = EMA.replace('2e-4', '0.5')  # so that the two differ after a step or two
    saved = torch.load(train_with(config, options) / 'epoch_2.pth', weights_only=False)
    average, trained = saved['state_dict'], saved['ema_state_dict']  # mmengine has swapped them
    name = 'bbox_head.retina_cls.bias'
    assert not torch.equal(average[name], trained[f'module.{name}'])
    tested = {}

    class Spy(testing.CommandRunner):
        def call_hook(self, name: str, **options: object) -> None:
            super().call_hook(name, **options)
            if name == 'before_test_iter':
                tested.update(self.model.state_dict())

    monkeypatch.setattr(testing, 'CommandRunner', Spy)
    for with_hook in (['log_level=INFO'], shlex.split(options)):
        tested.clear()
        assert test_tool.main([str(config), 'work/epoch_2.pth', '--cfg-options', *with_hook]) == 0
        assert not [k for k, v in average.items() if not torch.equal(v, tested[k])]
