"""The files that services and other tools read name what exists."""

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import extras
import pytest
import yaml
from release import PROBE, check_tag, owner_in, set_owner
from support import ROOT, pyproject, run

import cpvt_pyramid

WORKFLOWS = sorted((ROOT / '.github/workflows').glob('*.yml'))
TARGETS = re.findall(r'^([a-z-]+):', (ROOT / 'Makefile').read_text(), re.M)
PROJECT = pyproject()['project']


def test_mypy_leaves_out_modules_that_exist():
    names = [name for part in pyproject()['tool']['mypy']['overrides'] for name in part['module']]
    assert names
    for name in names:
        path = ROOT / name.replace('.', '/')
        assert path.with_suffix('.py').is_file(), f'remove {name} from pyproject.toml'


def test_what_bare_environments_run(tmp_path):
    """`make dist` runs it in environments of its own, and tests do not run `make dist`."""
    examples = ROOT / 'examples'
    files = [examples / 'trees.onnx', examples / 'trees/florida.jpg']
    subprocess.run([sys.executable, '-c', PROBE, *files], check=True, cwd=tmp_path)


def test_citation():
    """The required fields of the schema of version 1.2.0, and its types of persons."""
    citation = yaml.safe_load((ROOT / 'CITATION.cff').read_text())
    assert citation['cff-version'] == '1.2.0' and citation['message'] and citation['title']
    assert citation['type'] == 'software' and citation['license'] == 'Apache-2.0'
    assert 'version' not in citation  # the package alone has it
    for work in (citation, *citation['references']):
        assert {'type', 'title', 'authors'} <= work.keys()
        for author in work['authors']:
            assert author.keys() in ({'name'}, {'family-names', 'given-names'})


def jobs() -> Iterator[tuple[str, dict]]:
    """The jobs of all workflows, by workflow and name."""
    for path in WORKFLOWS:
        for name, job in yaml.safe_load(path.read_text())['jobs'].items():
            yield f'{path.name}: {name}', job


def steps_of(job: dict) -> list[dict]:
    """The steps of a job, once for each row of its matrix, with the row's values."""
    rows = job.get('strategy', {}).get('matrix', {}).get('include', [{}])
    text = yaml.safe_dump(job['steps'])
    steps = []
    for row in rows:
        filled = text
        for key, value in row.items():
            filled = filled.replace(f'${{{{ matrix.{key} }}}}', str(value))
        steps += yaml.safe_load(filled)
    return steps


def test_workflows_call_targets():
    """Jobs run targets of the Makefile; where there may be no make, modules of Python."""
    called = set()
    for name, job in jobs():
        for step in steps_of(job):
            words = step.get('run', 'make').split()
            if words[0] == 'make':
                called |= set(words[1:])
            else:
                assert words[:2] == ['python', '-m'], (name, step)
    wanted = {'coverage', 'test-torch', 'test-original-mm', 'test-core', 'lint', 'docs'}
    assert wanted | {'release', 'docs-deploy'} <= called <= set(TARGETS)


def test_actions_are_pinned():
    """By commits, because tags can be moved, with the tag behind."""
    for path in WORKFLOWS:
        used = re.findall(r'uses: (.*)', path.read_text())
        assert used
        for action in used:
            assert re.fullmatch(r'[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+', action), action
    for name, job in jobs():
        assert job['timeout-minutes'], name


def test_paths_in_workflows_exist():
    for name, job in jobs():
        for step in steps_of(job):
            for path in re.findall(r'tests/\S+', step.get('run', '')):
                assert (ROOT / path).exists(), (name, path)
    core = next(job for name, job in jobs() if name == 'tests.yml: core')
    rows = {(row['os'], row['python']) for row in core['strategy']['matrix']['include']}
    assert rows >= {('ubuntu-latest', '3.10'), ('ubuntu-latest', '3.13')}
    assert {system for system, _ in rows} == {'ubuntu-latest', 'macos-latest', 'windows-latest'}


@pytest.mark.parametrize('target', TARGETS)
def test_targets_of_make_name_what_exists(target):
    done = run('make', '--dry-run', '-C', ROOT, target)
    assert done.returncode == 0, done.stderr
    for path in re.findall(
        r'\s((?:benchmarks|configs|docs|requirements|tests|tools)/\S+)', done.stdout
    ):
        assert (ROOT / path).exists(), path
    for module in re.findall(r'-m ((?:benchmarks|experiments)\.\S+)', done.stdout):
        assert importlib.util.find_spec(module), module


def test_each_extra_is_tried():
    assert extras.USES.keys() == PROJECT['optional-dependencies'].keys()
    assert {*extras.ADDITIONS} < extras.USES.keys()


def test_badges_have_workflows():
    """A badge of a workflow names one that exists. The other badges are pictures in docs/."""
    for picture in re.findall(r'!\[[^]]*\]\(([^)\s]+)', (ROOT / 'README.md').read_text()):
        if 'actions/workflows/' in picture:
            name = re.search(r'workflows/([\w-]+\.yml)/badge\.svg', picture)[1]
            assert ROOT / '.github/workflows' / name in WORKFLOWS
        else:
            assert (ROOT / picture).is_file(), picture


def test_releases_need_a_dated_entry():
    version = cpvt_pyramid.__version__
    tag = f'v{version}'
    project = '[project.urls]\nRepository = "https://github.com/me/cpvt_pyramid"\n'
    released = f'# Changelog\n\n## {version} (2026-11-30)\n'
    check_tag(tag, released, project)
    with pytest.raises(SystemExit, match='still has OWNER: make owner NAME=ACCOUNT'):
        check_tag(tag, released, project.replace('/me/', '/OWNER/'))
    for wrong, changelog, complaint in (
        ('v0.0.0', f'## {version} (2026-11-30)\n', f'the tag must be {tag}'),
        ('', f'## {version} (2026-11-30)\n', f'the tag must be {tag}'),
        (tag, '## 0.0.0 (2026-11-30)\n', 'has no entry'),
        (tag, f'## {version} (not released)\n', r'needs a date, YYYY-MM-DD, got \(not released\)'),
        (tag, f'## {version} (2026-13-01)\n', 'needs a date'),
    ):
        with pytest.raises(SystemExit, match=complaint):
            check_tag(wrong, changelog, project)
    headings = re.findall(r'^## .*', (ROOT / 'CHANGELOG.md').read_text(), re.M)
    assert headings[0].startswith(f'## {version} (')
    for heading in headings[1:]:
        assert re.fullmatch(r'## \S+ \(\d{4}-\d\d-\d\d\)', heading)


def test_one_command_sets_the_owner(tmp_path):
    """In all files that have the address, and no sentence about the placeholder stays."""
    names = ('pyproject.toml', 'README.md', 'SECURITY.md')
    for name in names:
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(['git', 'init', '-q'], cwd=tmp_path, check=True)
    subprocess.run(['git', 'add', *names], cwd=tmp_path, check=True)
    before = owner_in((ROOT / 'pyproject.toml').read_text())
    assert (
        f'git clone https://github.com/{before}/cpvt_pyramid ' in (ROOT / 'README.md').read_text()
    )
    assert set_owner('some-body', tmp_path) == ['README.md', 'pyproject.toml']
    project = (tmp_path / 'pyproject.toml').read_text()
    assert owner_in(project) == 'some-body'
    readme = (tmp_path / 'README.md').read_text()
    assert 'git clone https://github.com/some-body/cpvt_pyramid ' in readme
    assert 'OWNER' not in readme + project
    assert set_owner('another', tmp_path) == ['README.md', 'pyproject.toml']
    for wrong in ('', 'OWNER', 'a/b', '-a'):
        with pytest.raises(SystemExit, match='NAME must be an account'):
            set_owner(wrong, tmp_path)


def test_the_readme_of_the_package_index():
    """Its links lead to the repository, or nothing is left of them but their text."""
    spec = importlib.util.spec_from_file_location('setup_script', ROOT / 'setup.py')
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    readme = '[![a: 1](docs/a.svg)](LICENSE) [b](docs/b.md#c), [d](https://e.org) ![f](g.png)'
    linked = script.for_index(readme, '[project.urls]\nRepository = "https://h/i"\n')
    assert linked == (
        '[![a: 1](https://h/i/raw/HEAD/docs/a.svg)](https://h/i/blob/HEAD/LICENSE) '
        '[b](https://h/i/blob/HEAD/docs/b.md#c), [d](https://e.org) '
        '![f](https://h/i/raw/HEAD/g.png)'
    )
    nowhere = '[project.urls]\nRepository = "https://h/OWNER/i"\n'
    assert script.for_index(readme, nowhere) == ' b, [d](https://e.org) '
    ours = script.for_index((ROOT / 'README.md').read_text(), nowhere)
    assert re.findall(r'\]\((?!https?:)[^)]*\)', ours) == []


def test_containers_set_up():
    files = list((ROOT / 'docker').glob('*.Dockerfile'))
    assert len(files) == 2
    hadolint = Path(sys.executable).with_name('hadolint')
    done = subprocess.run([hadolint, *files], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, '')
    container = json.loads((ROOT / '.devcontainer/devcontainer.json').read_text())
    for text in (container['postCreateCommand'], *(path.read_text() for path in files)):
        assert re.search(r'make setup(\s|$)', text)


def test_what_contributors_are_asked():
    """The hooks before a commit are those of `make lint`; forms have what GitHub requires."""
    (repository,) = yaml.safe_load((ROOT / '.pre-commit-config.yaml').read_text())['repos']
    recipe = re.search(r'^lint:.*\n((?:\t.*\n)+)', (ROOT / 'Makefile').read_text(), re.M)[1]
    checks = {hook['entry'].removesuffix(' --force-exclude') for hook in repository['hooks']}
    lines = [line.split('-0 ')[-1].removesuffix(' .') for line in recipe.split('\n\t')]
    assert {line.strip() for line in lines} == checks
    forms = (ROOT / '.github/ISSUE_TEMPLATE').glob('[!c]*.yml')
    for form in map(yaml.safe_load, (path.read_text() for path in forms)):
        assert form['name'] and form['description'] and form['body']
        assert all(part['attributes']['label'] for part in form['body'])
    updates = yaml.safe_load((ROOT / '.github/dependabot.yml').read_text())['updates']
    assert [update['package-ecosystem'] for update in updates] == ['github-actions']


def test_versions_and_extras():
    """The oldest Python is the one that tests/release.py knows and that `make test-core` tries."""
    oldest = PROJECT['requires-python'].removeprefix('>=3.')
    assert f'OLDEST_PYTHON = (3, {oldest})' in (ROOT / 'tests/release.py').read_text()
    for name in ('tests', 'release'):
        workflow = (ROOT / f'.github/workflows/{name}.yml').read_text()
        assert re.search(rf'^ +3\.{oldest}$', workflow, re.M)
    dependencies = yaml.safe_load((ROOT / 'environment.yml').read_text())['dependencies']
    (packages,) = [d['pip'] for d in dependencies if isinstance(d, dict)]
    names = re.findall(r'\w+', re.search(r'\[(.*)\]', packages[0])[1])
    assert names and set(names) <= PROJECT['optional-dependencies'].keys()
