"""What each command says about a model or a config that it cannot open."""

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from support import ROOT, load_tool

from cpvt_pyramid.__main__ import main
from cpvt_pyramid.app.predict.options import EXPORTED, ModelOptions, RunOptions, RuntimeOptions
from cpvt_pyramid.app.tooling.command import declared_arguments

NAME = 'retinanet_pvt_v2_b2_coco'
CONFIG = 'retinanet_cpvt_s'
# In each command, MODEL stands for the model or config.
PREDICTING = (
    'infer MODEL photo.jpg',
    'app MODEL',
    'export MODEL --out new.onnx',
    'test MODEL data.yaml',
)
OF_FILES = ('verify MODEL', 'quantize MODEL photo.jpg')
OF_CONFIGS = ('train MODEL',)
COMMANDS = {
    'app': ModelOptions,
    'infer': RunOptions,
    'test': RunOptions,
    'verify': RuntimeOptions,
}


@pytest.fixture
def said(tmp_path, monkeypatch, capsys):
    """Runs a command in a folder that has a photograph; returns the line that it ends with."""
    monkeypatch.chdir(tmp_path)
    Image.new('RGB', (40, 30)).save('photo.jpg')

    def run(command: str, model: str) -> str:
        assert main([model if word == 'MODEL' else word for word in command.split()]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line.partition(': ')[2]

    return run


@pytest.mark.parametrize('command, options', [*COMMANDS.items()])
def test_options_of_models_are_those_of_one_class(command, options):
    """With one help text; what a kind of model does not have is one line."""
    declared = {
        each.name: each for each in declared_arguments(getattr(load_tool(command), command))
    }
    for each in declared_arguments(options):
        assert declared[each.name] == each and each.text


def test_help_needs_no_packages():
    """Those of a model are imported when it is opened: --help is quick."""
    program = (
        'import sys\nfrom cpvt_pyramid.__main__ import main\n'
        f'for command in {[*COMMANDS]}:\n'
        '    try:\n        main([command, "--help"])\n    except SystemExit:\n        pass\n'
        'assert not {"numpy", "PIL", "cv2", "torch"} & {*sys.modules}'
    )
    subprocess.run([sys.executable, '-c', program], check=True, capture_output=True)


@pytest.mark.parametrize('command', ['infer MODEL photo.jpg', 'app MODEL', 'test MODEL data.yaml'])
def test_options_that_a_kind_of_model_lacks(command, said):
    trees = str(ROOT / 'examples/trees.onnx')
    line = said(f'{command} --cfg-options a=1', trees)
    assert line == f'--cfg-options is for models with a config, not for {EXPORTED} such as {trees}'
    line = said(f'{command} --backend openvino', NAME)
    assert line == f'--backend is for {EXPORTED}, not for trained models by name such as {NAME}'
    assert said(f'{command} --score-thr 2', trees) == '--score-thr must be in [0, 1], got 2.0'
    line = said(f'{command} --shorter-side 0', trees)
    assert line == '--shorter-side must be at least 1, got 0'


@pytest.mark.parametrize('command', PREDICTING)
def test_a_misspelt_name(command, said):
    unknown = f'no model at {NAME[:-1]}, and none of this name in cpvt models'
    assert said(command, NAME[:-1]).startswith(f'{unknown}; did you mean {NAME}')
    line = said(command, 'yolo')
    assert line.startswith('no model at yolo, and none of this name in cpvt models; the model must')


def test_names_that_other_commands_take(said, capsys):
    assert 'did you mean pcpvt_small' in said('export MODEL weights.pth --out a.onnx', 'pcpvt_smal')
    for command in PREDICTING[:2]:
        assert 'pcpvt_small' not in said(command, 'pcpvt_smal').partition('none of this name')[2]
        line = said(command, 'pcpvt_small')
        assert line.startswith('pcpvt_small is the architecture of a backbone; the model must be ')
    for command in PREDICTING:
        line = said(command, CONFIG)
        assert line.startswith(f'{CONFIG} is a config of this package ({ROOT}/configs/{CONFIG}.py)')
    for command in OF_FILES:
        line = said(command, NAME)
        assert f'cpvt export {NAME} --out {NAME}.onnx makes a file of it; the model must' in line
    assert main(['models']) == 0
    assert 'pcpvt_small, ' in capsys.readouterr().out


@pytest.mark.parametrize('command', [*PREDICTING, *OF_FILES])
def test_a_folder_instead_of_a_model(command, said):
    Path('results').mkdir()
    assert said(command, 'results').startswith('results is a folder; the model must be ')
    name = 'epoch_1.pth' if command.startswith('export') else 'trees.onnx'
    Path('results', name).touch()
    assert said(command, 'results').endswith(f'; did you mean results/{name}?')


@pytest.mark.parametrize('command', OF_FILES)
def test_files_that_are_no_exported_models(command, said):
    Path('weights.pth').touch()
    line = 'weights.pth must be an exported model (.onnx, .xml); cpvt export writes one'
    assert said(command, 'weights.pth') == line
    Path('trees.onnx').touch()
    assert said(command, 'tree.onnx') == 'no model at tree.onnx; did you mean trees.onnx?'
    assert said(command, 'nothing.onnx') == 'no model at nothing.onnx'
    assert said(command, 'nothing') == (
        'no model at nothing; the model must be an exported model (.onnx, .xml)'
    )


@pytest.mark.parametrize('command', PREDICTING[:2])
def test_an_exported_model_of_a_similar_name(command, said):
    Path('trees.onnx').touch()
    assert said(command, 'tree.onnx') == 'no model at tree.onnx; did you mean trees.onnx?'


@pytest.mark.parametrize('command', PREDICTING)
def test_an_image_instead_of_a_model(command, said):
    line = said(command, 'photo.jpg')
    assert line.startswith('photo.jpg is an image; the model comes first, and must be ')
    assert ('CONFIG' in line) == (not command.startswith('app'))


def test_a_checkpoint_that_is_elsewhere(said):
    Path('epoch_1.pth').touch()
    line = said('export MODEL --out a.onnx', 'epoch_2.pth')
    assert line == 'no checkpoint at epoch_2.pth; this folder has epoch_1.pth'
    assert said('app MODEL', 'epoch_1.pth').startswith('epoch_1.pth must be an exported model')


def test_the_page_takes_no_config(said):
    line = said('app MODEL', 'my.py')
    assert line.endswith('; export its model: cpvt export my.py CHECKPOINT --out FILE.onnx')


@pytest.mark.parametrize('command', OF_CONFIGS)
@pytest.mark.parametrize(
    'config, advice',
    [
        (CONFIG, f'this package has {ROOT}/configs/{CONFIG}.py'),
        (f'configs/{CONFIG}.py', f'this package has {ROOT}/configs/{CONFIG}.py'),
        ('retinanet_cvpt_s', f'did you mean {ROOT}/configs/retinanet_cpvt_s.py'),
        ('retinanet_pvt_v2_b2_coco', f'did you mean {ROOT}/configs/retinanet_pvt_v2_b2'),
        ('yolo.py', f'those of this package are in {ROOT}/configs'),
        ('mine.py', 'did you mean mine_too.py?'),
    ],
)
def test_a_config_that_is_elsewhere(command, config, advice, said):
    Path('mine_too.py').touch()
    line = said(command, config)
    assert line.startswith(f'no config at {config}; ')
    assert advice in line


@pytest.mark.parametrize('command', OF_CONFIGS)
def test_what_is_no_config(command, said):
    Path('notes.txt').touch()
    Path('work').mkdir()
    suffixes = '.py, .yaml, .yml, .json'
    assert said(command, 'notes.txt') == f'notes.txt must be a config ({suffixes})'
    assert said(command, 'work') == f'work is a folder; give a config ({suffixes}) in it'


@pytest.mark.parametrize(
    'command', ('infer MODEL a.pth photo.jpg', 'check-data MODEL', *PREDICTING[2:], *OF_CONFIGS)
)
def test_a_config_that_ends_in_capitals(command, said):
    """mmengine reads none."""
    Path('MY.PY').touch()
    assert said(command, 'MY.PY') == 'MY.PY must end in .py: mmengine reads no capitals; rename it'


def test_samples_that_are_no_folder(said):
    line = said('app MODEL --samples photo.jpg', str(ROOT / 'examples/trees.onnx'))
    assert line == '--samples must be a folder of images, got photo.jpg: it is a file'
    line = said('app MODEL --samples nowhere', str(ROOT / 'examples/trees.onnx'))
    assert line == '--samples must be a folder of images, got nowhere: there is none'


@pytest.mark.parametrize(
    'source, advice',
    [
        (CONFIG, f'; this package has {ROOT}/configs/{CONFIG}.py'),
        (f'configs/{CONFIG}.py', f'; this package has {ROOT}/configs/{CONFIG}.py'),
        ('photo', '; did you mean photos?'),
        ('label', '; did you mean Labels?'),
        ('elsewhere', ''),
    ],
)
def test_data_that_is_elsewhere(source, advice, said):
    Path('photos').mkdir()
    Path('Labels').mkdir()
    assert said('check-data MODEL', source) == f'no folder or file {source}{advice}'


def test_weights_by_a_name(said):
    line = said('convert-weights MODEL --to mmseg', NAME[:-1])
    assert line == f'no checkpoint at {NAME[:-1]}; there is a trained model {NAME}'
