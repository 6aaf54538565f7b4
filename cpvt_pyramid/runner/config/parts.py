"""What a config says: the types of its parts, its data sets, their classes."""

import io
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from importlib import import_module
from typing import Any, Optional

from mmengine.config import Config
from mmengine.registry import DATASETS

from ...results.drawing import class_palette
from ...tooling.command import UserError

FRAMEWORKS = 'mmdet', 'mmseg'
SPLITS = 'train', 'val', 'test'


def kind_of(config: dict) -> str:
    """The name of the class in `type`, which may be a class, or a string with a scope or module."""
    kind = config.get('type') or ''
    return kind.rpartition('.')[2] if isinstance(kind, str) else getattr(kind, '__name__', '')


def as_list(value: Any) -> list:
    return list(value) if isinstance(value, (list, tuple)) else [value] if value else []


def dicts_in(value: Any, path: str = '') -> Iterator[tuple[str, dict]]:
    """The dicts inside a config, with their paths as in --cfg-options."""
    if isinstance(value, dict):
        yield path, value
        # The wrappers of resume.py are not in the user's config.
        hidden = ('dataset', 'sampler') if kind_of(value).startswith('Seeded') else ()
        items = list(value.items())
    elif isinstance(value, (list, tuple)):
        hidden = ()
        items = list(enumerate(value))
    else:
        return
    for key, inner in items:
        yield from dicts_in(inner, path if key in hidden else f'{path}.{key}'.lstrip('.'))


def data_of(cfg: Config, split: str) -> list[dict]:
    """The innermost data sets of a split."""
    loader = cfg.get(f'{split}_dataloader')
    return list(leaves(loader.dataset)) if loader else []


def leaves(dataset: dict) -> Iterator[dict]:
    """The innermost data sets of RepeatDataset, ConcatDataset and other wrappers."""
    inner = as_list(dataset.get('dataset')) + as_list(dataset.get('datasets'))
    for child in inner:
        yield from leaves(child)
    if not inner:
        yield dataset


def dataset_class(dataset: dict, scope: str) -> type:
    """The class of a data set's config."""
    kind = dataset.get('type')
    if isinstance(kind, str):
        import_datasets(scope)
        with DATASETS.switch_scope_and_registry(scope) as registry:
            with suppress(ImportError, RuntimeError, TypeError, ValueError):
                kind = registry.get(kind)  # imports what looks like a module
    if not callable(kind):
        raise UserError(f'{scope} has no data set {dataset.get("type")!r}')
    return kind


def import_datasets(scope: str) -> None:
    """Import the data sets of a framework, whose registry would import them when it needs them.

    Without its output: the maintained fork of mmdet prints "Could not import OneDL" twice, about
    data sets of another package that are not used here.
    """
    with redirect_stdout(io.StringIO()), suppress(ImportError):
        import_module(f'{scope}.datasets')


def framework_of(kind: Any) -> Optional[str]:
    """The framework that a class is from or inherits from, if it is a class."""
    packages = [c.__module__.partition('.')[0] for c in getattr(kind, '__mro__', ())]
    return next((package for package in packages if package in FRAMEWORKS), None)


def dataset_meta(cfg: Config, checkpoint: dict, split: str = 'test') -> dict:
    """`classes`, from the checkpoint or else the config's data set, and their `palette`.

    The palette is that of the config or the data set's class, or else distinct colours. It is not
    the checkpoint's, where mmseg stores random colours if none are declared.
    """
    dataset = next(leaves(cfg[f'{split}_dataloader'].dataset))
    kind = dataset_class(dataset, cfg.default_scope)
    declared = {**getattr(kind, 'METAINFO', {}), **(dataset.get('metainfo') or {})}
    trained = checkpoint.get('meta', {}).get('dataset_meta') or {}
    classes = {k.lower(): v for k, v in {**declared, **trained}.items()}.get('classes', ())
    return {'classes': classes, 'palette': class_palette(classes, declared.get('palette'))}


def loaded_bands(cfg: Config) -> Optional[tuple[int, ...]]:
    """The bands that the test pipeline of a config loads; None if it loads RGB."""
    for step in next(leaves(cfg.test_dataloader.dataset))['pipeline']:
        if kind_of(step).endswith('LoadBands'):
            return tuple(step['bands'])
    return None


def is_local(path: str) -> bool:
    return '://' not in path
