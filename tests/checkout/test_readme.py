"""The README's code runs, its commands and those of other pages parse, its table is current."""

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Optional

import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from support import ROOT, load_tool, pyproject
from torch.overrides import TorchFunctionMode

from benchmarks import model_table, published, speed_tables
from benchmarks.pages import with_section
from cpvt_pyramid import ARCHS
from cpvt_pyramid.__main__ import main
from cpvt_pyramid.app.tooling.command import parser_of
from cpvt_pyramid.tasks.trained import TRAINED

README = (ROOT / 'README.md').read_text()
MM = (ROOT / 'docs/mm.md').read_text()
WITH_BASH = [README, MM]
for name in ('CONTRIBUTING.md', 'docs/bands.md', 'docs/install.md', 'examples/README.md'):
    WITH_BASH.append((ROOT / name).read_text())


def blocks(language: str) -> list[str]:
    return re.findall(rf'```{language}\n(.*?)```', README, re.S)


def commands() -> list[str]:
    code = '\n'.join(re.findall(r'```bash\n(.*?)```', '\n'.join(WITH_BASH), re.S))
    lines = code.replace('\\\n', '').splitlines()
    inline = re.findall(r'`((?:make |python |cpvt [\w-]+ |tools/)[^`\n|]+)`', README + MM)
    return [re.sub(r'\s*#.*', '', line) for line in [*lines, *inline] if line.strip()]


def test_plain_pytorch(tmp_path, monkeypatch, capsys):
    asked, file = [], tmp_path / 'model.safetensors'
    save_file(timm.create_model('twins_pcpvt_small').state_dict(), file)
    monkeypatch.setattr(
        'cpvt_pyramid.checkpoints.downloads.from_hub', lambda *args: asked.append(args) or file
    )
    exec(blocks('python')[0], {})
    out = capsys.readouterr().out
    assert asked == [('timm/twins_pcpvt_small.in1k', 'model.safetensors')]
    assert out.startswith('loaded 300 of 300 tensors, 0 missing, 4 unused (head')
    assert '(1, 64, 107, 160), (1, 128, 54, 80), (1, 320, 27, 40), (1, 512, 14, 20)' in out


def test_timm():
    (block,) = [b for b in blocks('python') if 'timm.create_model' in b]
    names = {}
    exec(block.replace('pretrained=True', 'pretrained=False'), names)  # its weights are on a hub
    theirs = timm.create_model(re.search(r"timm's own is (\w+)", block)[1]).eval()
    names['model'].load_state_dict(theirs.state_dict())
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(names['model'].eval()(x), theirs(x), rtol=1e-3, atol=1e-4)
        assert len(names['backbone'].eval()(x[..., :100, :90])) == 4


def test_every_command_is_tested():
    known = (
        'git clone ',
        'make ',
        'cpvt ',
        'python tools/',
        'tools/dist_train.sh ',
        'python -m benchmarks.',
        'python -m experiments.',
        '.venv/bin/python -m pytest tests/',
        "pip install '.[",
        'pip install "setuptools<81" wheel ninja ',  # `make compiled`
        'MMCV_WITH_OPS=1 pip install ',
    )
    assert len(commands()) >= 10 and len(sum(PAGES.values(), [])) >= 10
    assert [c for c in commands() if not c.startswith(known)] == []


@pytest.mark.parametrize('command', [c for c in commands() if c.startswith('make ')])
def test_make(command):
    done = subprocess.run(['make', '-n', *command.split()[1:]], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr
    for path in re.findall(r'\s((?:tools|configs)/\S+)', done.stdout.decode()):
        assert (ROOT / path).is_file(), path


IS_OURS = re.compile(r'([A-Z_]+=\S+ )*(cpvt|(python )?tools/\S+) ')


def indented_commands(page: str) -> list[str]:
    lines = (ROOT / page).read_text().replace('\\\n', '').splitlines()
    ours = [line for line in lines if re.match(rf' {{4}}{IS_OURS.pattern}', line)]
    return [re.sub(r'\s*#.*', '', line).strip() for line in ours]


PAGES = {
    page: indented_commands(page)
    for page in (
        'configs/README.md',
        'docs/ecosystems.md',
        'docs/export.md',
        'docs/invariance.md',
        'docs/own_data.md',
        'docs/predict.md',
        'docs/training.md',
    )
}


@pytest.mark.parametrize('command', [*filter(IS_OURS.match, commands()), *sum(PAGES.values(), [])])
def test_tools_understand(command, tmp_path):
    """A fake interpreter, or a fake srun, says what the shell scripts start."""
    words = shlex.split(re.sub(r'^([A-Z_]+=\S+ )+|^python ', '', command))
    if words[0].endswith('.sh'):
        fake, srun, said = tmp_path / 'py', tmp_path / 'srun', tmp_path / 'said'
        for program in (fake, srun):
            program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {said}')
            program.chmod(0o755)
        path = f'{tmp_path}:{os.environ["PATH"]}'
        environment = os.environ | {'PYTHON': str(fake), 'PATH': path}
        subprocess.run(['bash', '-c', command], cwd=ROOT, env=environment, check=True)
        words = said.read_text().splitlines()
        tools = 'train.py', 'test.py', 'infer.py'
        start = next(i for i, word in enumerate(words) if word.endswith(tools))
        words = [f'tools/{Path(words[start]).name}', *words[start + 1 :]]
    if words[0] == 'cpvt':
        _, name, *words = words
        name = name.replace('-', '_')
    else:
        name, *words = words[0].removeprefix('tools/').removesuffix('.py'), *words[1:]
    if name in ('help', 'doctor', 'version', 'demo_data'):
        return
    options = options_of(name, words)
    if config := options.get('config'):
        named = config in TRAINED or config in ARCHS or config in ('CONFIG', 'DATA', 'my.py')
        assert named or (ROOT / config).is_file()


def options_of(tool: str, words: list[str]) -> dict:
    return vars(parser_of(getattr(load_tool(tool), tool)).parse_args(words))


def test_badges():
    project = pyproject()['project']
    torch, *_ = project['optional-dependencies']['torch']
    for name, value in (
        ('python', project['requires-python'].removeprefix('>=')),
        ('torch', torch.removeprefix('torch>=')),
        ('licence', project['license']),
    ):
        assert f'>{value}' in (ROOT / f'docs/badge-{name}.svg').read_text()


def test_exported_models(tmp_path, monkeypatch):
    """The commands that need no torch: `cpvt infer`, and the web page."""
    monkeypatch.chdir(ROOT)
    (command,) = {c for c in commands() if c.startswith('cpvt infer examples/')}
    assert main([*shlex.split(command)[1:], '--out-dir', str(tmp_path)]) == 0
    found = json.loads((tmp_path / 'florida.detections.json').read_text())['detections']
    assert len(found) > 1 and (tmp_path / 'florida.overlay.jpg').is_file()
    (command,) = {c for c in commands() if c.startswith('cpvt app examples/')}
    assert Path(options_of('app', shlex.split(command)[2:])['model']).is_file()


class SkipUncounted(TorchFunctionMode):
    """Skips layer norms and GELU: their operations are not counted, and on the meta device they
    take longer than what is counted."""

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: Optional[dict] = None
    ) -> Any:
        if func in (F.layer_norm, F.gelu):
            return args[0]
        return func(*args, **(kwargs or {}))


def test_tables_of_models_are_current():
    assert with_section(README, 'models', model_table.readme_table()) == README
    page = (ROOT / 'docs/models.md').read_text()
    with SkipUncounted():
        assert model_table.models_page(page) == page
    assert model_table.metafile() == (ROOT / 'configs/metafile.yml').read_text()


def test_sources_of_accuracies():
    """A recipe whose results a library published, and not the authors, says so in its first config,
    and so do the tables."""
    named = [
        (published.family_of(arch), library, recipe.config.format(published.BACKBONES[arch].short))
        for recipe in published.RECIPES
        for family, library in recipe.others.items()
        for arch in recipe.results
        if published.family_of(arch).name == family
    ]
    assert {library for _, library, _ in named} == {'MMDetection', 'MMSegmentation'}
    for (family, library), configs in groupby(named, key=lambda item: item[:2]):
        *_, config = next(configs)
        assert f"{library}'s" in (ROOT / f'configs/{config}.py').read_text(), config
        (row,) = re.findall(rf'^\| {re.escape(family.title)} \|.*', README, re.M)
        assert f'{library} |' in row


def test_tables_of_speed_are_those_that_were_measured():
    measured = speed_tables.read()
    assert with_section(README, 'speed', speed_tables.readme_section(measured)) == README
    page = (ROOT / 'docs/performance.md').read_text()
    assert with_section(page, 'speed', speed_tables.page_section(measured)) == page
