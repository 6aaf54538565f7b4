"""The files that services and other tools read name what exists."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support import ROOT, pyproject

import cpvt_pyramid

WORKFLOWS = sorted((ROOT / '.github/workflows').glob('*.yml'))
TARGETS = re.findall(r'^([a-z-]+):', (ROOT / 'Makefile').read_text(), re.M)
PROJECT = pyproject()['project']
# The first versions that run on Node 24. GitHub removed Node 20 in September 2026.
ACTIONS = {'checkout': 5, 'setup-python': 6, 'cache': 5, 'upload-artifact': 6}


def test_citation():
    """The required fields of the schema of version 1.2.0, and its types of persons."""
    citation = yaml.safe_load((ROOT / 'CITATION.cff').read_text())
    assert citation['cff-version'] == '1.2.0' and citation['message'] and citation['title']
    assert citation['type'] == 'software' and citation['license'] == 'Apache-2.0'
    assert str(citation['version']) == cpvt_pyramid.__version__
    for work in (citation, *citation['references']):
        assert {'type', 'title', 'authors'} <= work.keys()
        for author in work['authors']:
            assert author.keys() in ({'name'}, {'family-names', 'given-names'})


@pytest.mark.parametrize('path', WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_targets(path):
    workflow = yaml.safe_load(path.read_text())
    called = set()
    for job in workflow['jobs'].values():
        rows = job.get('strategy', {}).get('matrix', {}).get('include', [{}])
        for step in job['steps']:
            command = step.get('run', '')
            assert command.startswith('make ') or 'uses' in step
            for row in rows:
                target = command.replace('${{ matrix.target }}', row.get('target', ''))
                called |= set(target.split()[1:])
    assert {'test', 'test-torch', 'test-original-mm', 'test-core', 'lint', 'docs'} <= called
    assert called <= set(TARGETS)


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
    """tests/release.py knows the oldest Python; actions run on a new Node."""
    workflow = WORKFLOWS[0].read_text()
    oldest = PROJECT['requires-python'].removeprefix('>=3.')
    assert f'OLDEST_PYTHON = (3, {oldest})' in (ROOT / 'tests/release.py').read_text()
    assert re.search(rf'\b3\.{oldest}\b', workflow)
    used = re.findall(r'uses: actions/([\w-]+)@v(\d+)', workflow)
    assert used and all(int(version) >= ACTIONS[name] for name, version in used)
    dependencies = yaml.safe_load((ROOT / 'environment.yml').read_text())['dependencies']
    (packages,) = [d['pip'] for d in dependencies if isinstance(d, dict)]
    names = re.findall(r'\w+', re.search(r'\[(.*)\]', packages[0])[1])
    assert names and set(names) <= PROJECT['optional-dependencies'].keys()
