"""Names and imports across the package."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / 'cpvt_pyramid'
FILES = sorted(PACKAGE.rglob('*.py'))
# From the bottom to the top: a file imports from its own layer and those below it.
LAYERS = ('ops', '', 'tooling', 'results', 'runtime', 'mm', 'runner', 'export', 'app')


def layer(path: Path) -> str:
    name = path.relative_to(PACKAGE).parts[0].removesuffix('.py')
    return name if name in LAYERS else ''


def definitions(path: Path) -> dict[str, ast.AST]:
    """The public functions and classes of a file."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    nodes = [node for node in ast.parse(path.read_text()).body if isinstance(node, kinds)]
    return {node.name: node for node in nodes if not node.name.startswith('_')}


def is_adapter(node: ast.AST) -> bool:
    """Whether a class derives from one of the same name, as those registered in mm do."""
    bases = node.bases if isinstance(node, ast.ClassDef) else []
    return any(isinstance(base, ast.Attribute) and base.attr == node.name for base in bases)


def imported(path: Path) -> set[Path]:
    """The files and folders of the package that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level:
            folder = path.parents[node.level - 1]
        elif (node.module or '').split('.')[0] == PACKAGE.name:
            folder = PACKAGE.parent
        else:
            continue
        module = folder.joinpath(*(node.module or '').split('.'))
        targets = [module.with_suffix('.py'), *(module / f'{a.name}.py' for a in node.names)]
        targets += [module / a.name / '__init__.py' for a in node.names] + [module / '__init__.py']
        found |= {target for target in targets if target.is_file()} - {path}
    return found


def test_public_names_are_unique():
    places = defaultdict(list)
    for path in FILES:
        for name, node in definitions(path).items():
            if not is_adapter(node) and name != 'main':
                places[name].append(str(path.relative_to(PACKAGE)))
    assert not {name: files for name, files in places.items() if len(files) > 1}


@pytest.mark.parametrize('path', FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_do_not_point_upwards(path):
    allowed = LAYERS[: LAYERS.index(layer(path)) + 1]
    above = [str(target.relative_to(PACKAGE)) for target in imported(path)
             if layer(target) not in allowed]  # fmt: skip
    assert not above


def test_exported_models_need_neither_torch_nor_mm():
    imports = (ast.Import, ast.ImportFrom)
    for path in (path for path in FILES if layer(path) in ('tooling', 'results', 'runtime')):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, imports) and not getattr(node, 'level', 0):
                names = [getattr(node, 'module', None) or a.name for a in node.names]
                assert not {n.split('.')[0] for n in names} & {'torch', 'mmengine', 'mmcv'}, path


def test_imports_have_no_cycle():
    below = {path: imported(path) - {PACKAGE / '__init__.py'} for path in FILES}
    while leaves := [path for path in below if not below[path] & below.keys()]:
        for path in leaves:
            del below[path]
    assert not {str(path.relative_to(PACKAGE)) for path in below}
