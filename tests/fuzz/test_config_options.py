"""Any --cfg-options: the checks before a run pass, or end in one line."""

from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import load_tool

from cpvt_pyramid.app.config.load import load_config
from cpvt_pyramid.app.config.parts import dicts_in
from cpvt_pyramid.app.training.runner import CommandRunner

FUZZ = settings.get_profile('fuzz')
train, test = load_tool('train'), load_tool('test')
VALUES = st.sampled_from(
    [
        'None',
        'True',
        '0',
        '1',
        '-1',
        '3',
        '0.5',
        '1e400',
        'nan',
        'a',
        '""',
        'a,b',
        '[1,2]',
        '(1,)',
        '[]',
        '[[1,2],[3]]',
        '{}',
        "dict(type='A')",
        '1,',
        '[',
        ')',
        '=',
        'a=b',
        '$HOME',
        'É',
        '../a.py',
        '/',
        'http://a/b',
        'CocoDataset',
        'mmdet.CocoDataset',
        'SGD',
        '9' * 20,
    ]
)


class Begun(BaseException):
    """The checks are over."""


@pytest.fixture(scope='module')
def known(configs) -> dict[str, list[str]]:
    """The paths of all settings of a config, as in --cfg-options."""
    return {
        name: [
            f'{path}.{key}'.lstrip('.')
            for path, inner in dicts_in(load_config(config).to_dict())
            for key in inner
        ]
        for name, config in configs.items()
    }


@pytest.mark.parametrize('tool, name', [(train, 'detector'), (test, 'segmentor')])
@settings(FUZZ)
@given(data=st.data())
def test_the_checks_pass_or_say_what_is_wrong(
    tool, name, data, configs, untrained, known, tmp_path_factory, capsys
):
    known_keys = st.sampled_from(known[name])
    parents = known_keys.map(lambda key: key.rpartition('.')[0] or key)
    children = st.tuples(known_keys, st.sampled_from(['typo', '0'])).map('.'.join)
    odd = st.sampled_from(['', '.', 'model.', '.model', 'custom_hooks', 'compile', 'load_from'])
    keys = known_keys | parents | children | odd
    options = data.draw(st.lists(st.tuples(keys, VALUES).map('='.join), min_size=1, max_size=3))
    work_dir = tmp_path_factory.mktemp('work')
    checkpoint = untrained[name][1:] if tool is test else []
    command = [str(configs[name]), *checkpoint, '--work-dir', str(work_dir), '--cfg-options']
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CommandRunner, 'from_cfg', mock.Mock(side_effect=Begun))
        try:
            status = tool.main([*command, *options])
        except Begun:
            return
        except SystemExit as exit:  # argparse
            status = exit.code
    errors = capsys.readouterr().err
    assert status == 2 and 'Traceback' not in errors and errors.strip()
