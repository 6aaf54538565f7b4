"""What a config says about a model that is exported, for the metadata of the file."""

import warnings
from typing import Any

from ..config.parts import dataset_meta, kind_of, leaves


def about_config(cfg: Any, checkpoint: dict) -> dict[str, Any]:
    """What a config and a checkpoint say about a model: classes, palette, resizing, architecture.
    Warns of a test pipeline that does more than resize."""
    meta = dataset_meta(cfg, checkpoint)
    resize = None
    for step in next(leaves(cfg.test_dataloader.dataset))['pipeline']:
        kind = kind_of(step)
        if kind.endswith('Resize') and step.get('scale') and step.get('keep_ratio'):
            resize = {'short': min(step.scale), 'long': max(step.scale)}
        elif not kind.startswith(('Load', 'Pack')):
            warnings.warn(
                f'the test pipeline has a step {dict(step)}, which the file does not describe; '
                'give it images as that step leaves them',
                stacklevel=1,
            )
    backbone = cfg.model.backbone
    arch = backbone.get('arch', '')
    if not isinstance(arch, str):
        arch = ''  # its numbers
    return {
        'classes': list(meta['classes']),
        'palette': [[int(v) for v in color] for color in meta['palette']],
        'resize': resize,
        'arch': f'{kind_of(cfg.model)}, {kind_of(backbone)} {arch}'.strip(),
    }
