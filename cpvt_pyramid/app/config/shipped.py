"""The configs in this package, by name. They are found without OpenMMLab."""

from pathlib import Path
from typing import Union

from ...tasks.trained import configs_folder
from ..tooling.command import UserError
from ..tooling.names import similar_names

CONFIG_SUFFIXES = '.py', '.yaml', '.yml', '.json'  # that mmengine reads


def shipped_configs() -> dict[str, Path]:
    """The configs of this package by name."""
    folder = configs_folder()
    return {path.stem: path for path in [*folder.glob('*.py'), *folder.glob('demo/*.py')]}


def is_config_name(path: Union[str, Path]) -> bool:
    """Whether a name ends as those of configs do, also in capitals."""
    return Path(path).suffix.lower() in CONFIG_SUFFIXES


def check_config_file(path: Union[str, Path]) -> None:
    """Raise a UserError unless a path is that of a file that may be a config."""
    file = Path(path)
    suffixes = ', '.join(CONFIG_SUFFIXES)
    if file.is_dir():
        raise UserError(f'{path} is a folder; give a config ({suffixes}) in it')
    if file.is_file():
        if not is_config_name(file):
            raise UserError(f'{path} must be a config ({suffixes})')
        if file.suffix not in CONFIG_SUFFIXES:
            raise UserError(
                f'{path} must end in {file.suffix.lower()}: mmengine reads no capitals; rename it'
            )
        return
    raise UserError(f'no config at {path}; {where_configs_are(file)}')


def where_configs_are(path: Path) -> str:
    """What to do where there is no config: the paths of those that may be meant."""
    neighbours = [p.name for p in path.parent.glob('*') if p.suffix in CONFIG_SUFFIXES]
    shipped = shipped_configs()
    name = path.stem if is_config_name(path) else path.name
    if name in shipped:
        return f'this package has {typed_path(shipped[name])}'
    meant = [path.with_name(near) for near in similar_names(path.name, neighbours)]
    if not meant:
        meant = [shipped[near] for near in similar_names(name, shipped)]
    question = f'; did you mean {" or ".join(map(typed_path, meant))}?' if meant else ''
    return f'those of this package are in {typed_path(configs_folder())}{question}'


def typed_path(path: Path) -> str:
    """A path as it can be typed here."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
