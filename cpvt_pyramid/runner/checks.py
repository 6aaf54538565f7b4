"""What a training begins with fits together: the classes of data and heads, the weights."""

import json
import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

from mmengine.config import Config
from mmengine.registry import DATASETS
from mmengine.runner import Runner
from torch import Tensor, nn

from ..weights import listed, prepare_state_dict
from .launch import UserError, is_local, leaves, read_checkpoint


def check_weights(runner: Runner) -> None:
    """See that the checkpoints of a training's beginning are whole and of its backbone.

    A backbone alone in `load_from` becomes the `init_cfg` of the model's backbone.
    """
    for name, module in runner.model.named_modules():
        if not hasattr(module, 'has_no_use_for'):  # as `prepare_state_dict` asks for
            continue
        init_cfg = getattr(module, 'init_cfg', None)
        if isinstance(init_cfg, dict) and init_cfg.get('type') == 'Pretrained':
            path, prefix = init_cfg['checkpoint'], init_cfg.get('prefix')
            tensors = read_checkpoint(path)['state_dict']
            if prefix:
                inside = f'{prefix.removesuffix(".")}.'
                found = {k[len(inside) :]: v for k, v in tensors.items() if k.startswith(inside)}
                if not found:
                    raise UserError(
                        f'{path} has nothing under the prefix {inside!r} of init_cfg, but '
                        f'{listed(list(tensors))}'
                    )
                tensors = found
            check_backbone(module, tensors, '', path)
        if runner._load_from and not runner._resume:
            check_load_from(runner, name, module)


def check_load_from(runner: Runner, name: str, module: nn.Module) -> None:
    """See that what `load_from` holds is of a backbone, and log which heads begin anew."""
    path = runner._load_from
    tensors = {
        re.sub(r'^module\.', '', k): v for k, v in read_checkpoint(path)['state_dict'].items()
    }
    name = re.sub(r'^module\.', '', name)
    if not any(key.startswith(f'{name}.') for key in tensors):
        check_backbone(module, tensors, '', path)
        runner.logger.info(f'{path} is a backbone alone: it begins model.{name}')
        module.init_cfg = {'type': 'Pretrained', 'checkpoint': str(path)}
        runner._load_from = None
        return
    check_backbone(module, tensors, f'{name}.', path)
    model = {re.sub(r'^module\.', '', k): v for k, v in runner.model.state_dict().items()}
    other = [k for k in model if k in tensors and tensors[k].shape != model[k].shape]
    if other:
        runner.logger.info(
            f'{path} was trained with other heads, for other classes perhaps. These begin anew: '
            f'{listed(other)}'
        )


def check_backbone(module: nn.Module, tensors: dict[str, Tensor], prefix: str, path: str) -> None:
    try:
        prepare_state_dict(module, dict(tensors), prefix)
    except ValueError as error:
        raise UserError(f'{path}: {error}') from error


def check_classes(cfg: Config, model: nn.Module, *splits: str) -> None:
    """See that data sets have as many classes as the heads, and annotations that name them.

    Args:
        cfg: the config.
        model: the model that is built from it.
        splits: of train, val and test.
    """
    for split in splits:
        loader = cfg.get(f'{split}_dataloader')
        for dataset in leaves(loader.dataset) if loader else ():
            with DATASETS.switch_scope_and_registry(cfg.default_scope) as registry:
                kind = registry.get(dataset.type)
            if not hasattr(kind, '_load_metainfo'):  # not a data set of mmengine's
                continue
            classes = kind._load_metainfo(dataset.get('metainfo')).get('classes')
            if isinstance(classes, str):
                raise UserError(
                    f'the classes of the {split} data are a string, {classes!r}; a tuple of one '
                    f'is ({classes!r},)'
                )
            if classes and 'Panoptic' not in kind.__name__:
                check_heads(model, len(classes), split)
            if classes and kind.__name__ == 'CocoDataset':
                check_categories(dataset, list(classes), split)


def check_heads(model: nn.Module, classes: int, split: str) -> None:
    for name, module in model.named_modules():
        name = re.sub(r'^module\.', '', name)
        is_head = re.search(r'(?<!rpn_)(?<!semantic_)head(\.\d+)?$', name)
        count = getattr(module, 'num_classes', None)
        if is_head and isinstance(count, int) and count != classes:
            key = 'num_things_classes' if hasattr(module, 'num_things_classes') else 'num_classes'
            raise UserError(
                f'model.{name} is for {count} classes and the {split} data have {classes}: set '
                f'model.{name}.{key}={classes}, or the classes of the data'
            )


def check_categories(dataset: dict, classes: list[str], split: str) -> None:
    """See that a COCO file has the classes as its categories, in their order.

    mmdet leaves out a class that the file does not name, with its objects, and numbers the others
    in the file's order.
    """
    path = Path(dataset.get('data_root') or '', dataset.get('ann_file') or '')
    if dataset.get('backend_args') or not is_local(str(path)) or not path.is_file():
        return
    names = category_names(path)
    if names is None:
        return
    lacking = [name for name in classes if name not in names]
    if lacking:
        raise UserError(
            f'{path} has no category {listed(lacking)}. It has {listed(names)}: name them in '
            f'{split}_dataloader.dataset.metainfo.classes'
        )
    order = [name for name in names if name in classes]
    if order != classes:
        raise UserError(
            f'{path} has its categories in another order than the classes of the {split} data; '
            f'theirs is {listed(order)}'
        )


def category_names(path: Path) -> Optional[list[str]]:
    """The names of the categories in a COCO file; None where they are not found.

    The file may have hundreds of megabytes of annotations: these are not parsed.
    """
    with path.open('rb') as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for start in starts(content, b'"categories"'):
            text = content[start : start + 2**22].decode(errors='ignore')
            text = text.partition(':')[2].lstrip()
            try:
                categories, _ = json.JSONDecoder().raw_decode(text)
                return [category['name'] for category in categories]
            except (ValueError, TypeError, KeyError):
                continue
    return None


def starts(content: mmap.mmap, word: bytes) -> Iterator[int]:
    """Where a word stands, from the last place on."""
    start = content.rfind(word)
    while start >= 0:
        yield start
        start = content.rfind(word, 0, start)
