#!/usr/bin/env python
"""Print the table of models in the README, from the models themselves; --write puts it in, and
writes configs/metafile.yml, in which mim finds the configs."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Optional

if TYPE_CHECKING:
    from mmengine.config import Config

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout that is not installed

README = ROOT / 'README.md'
METAFILE = ROOT / 'configs' / 'metafile.yml'
BEGIN, END = '<!-- models: tools/model_table.py -->\n', '<!-- end of models -->'


# What is published and not re-run here, once for all that shows it. PCPVT and SVT: Twins, arXiv
# 2104.13840, tables 1 to 6; PVT: arXiv 2102.12122, section 5; CPVT: arXiv 2102.10882, section 5.


class Backbone(NamedTuple):
    """A published architecture."""

    name: str  # the papers'
    short: str  # in the names of configs
    top1: float  # on ImageNet


class Recipe(NamedTuple):
    """A way to train with a backbone, and what was reached."""

    config: str  # the config's name, {} being the backbone's
    head: str
    metrics: dict[str, str]  # name: task
    results: dict[str, tuple[float, ...]]  # arch: values of the metrics; none: not published


BACKBONES = {
    'pcpvt_small': Backbone('PCPVT-S, CPVTv2-S', 'cpvt_s', 81.2),
    'pcpvt_base': Backbone('PCPVT-B, CPVTv2-B', 'cpvt_b', 82.7),
    'pcpvt_large': Backbone('PCPVT-L, CPVTv2-L', 'cpvt_l', 83.1),
    'pvt_tiny': Backbone('PVT-Tiny', 'pvt_t', 75.1),
    'pvt_small': Backbone('PVT-Small', 'pvt_s', 79.8),
    'pvt_medium': Backbone('PVT-Medium', 'pvt_m', 81.2),
    'pvt_large': Backbone('PVT-Large', 'pvt_l', 81.7),
    'svt_small': Backbone('Twins-SVT-S', 'svt_s', 81.7),
    'svt_base': Backbone('Twins-SVT-B', 'svt_b', 83.2),
    'svt_large': Backbone('Twins-SVT-L', 'svt_l', 83.7),
    'cpvt_tiny': Backbone('CPVT-Ti', 'columnar_cpvt_ti', 73.4),
}
BOX, MASK, SEMANTIC = 'Object Detection', 'Instance Segmentation', 'Semantic Segmentation'
RETINANET_1X = Recipe(
    'retinanet_{}',
    'RetinaNet',
    {'box AP': BOX},
    dict(
        pcpvt_small=(43.0,), pcpvt_base=(44.3,), pcpvt_large=(45.1,),
        pvt_tiny=(36.7,), pvt_small=(40.4,), pvt_medium=(41.9,), pvt_large=(42.6,),
        svt_small=(43.0,), svt_base=(45.3,), svt_large=(45.7,),
    ),
)  # fmt: skip
SEMANTIC_FPN = Recipe(
    'semantic_fpn_{}',
    'Semantic FPN',
    {'mIoU': SEMANTIC},
    dict(
        pcpvt_small=(44.3,), pcpvt_base=(44.9,), pcpvt_large=(46.4,),
        pvt_tiny=(35.7,), pvt_small=(39.8,), pvt_medium=(41.6,), pvt_large=(42.1,),
        svt_small=(43.2,), svt_base=(45.3,), svt_large=(46.7,),
        cpvt_tiny=(),
    ),
)  # fmt: skip
RECIPES = (
    RETINANET_1X,
    Recipe(
        'retinanet_{}_3x',
        'RetinaNet',
        {'box AP': BOX},
        dict(
            pcpvt_small=(45.2,), pcpvt_base=(46.4,), pcpvt_large=(),
            svt_small=(45.6,), svt_base=(46.9,), svt_large=(),
        ),
    ),
    Recipe(
        'mask_rcnn_{}',
        'Mask R-CNN',
        {'box AP': BOX, 'mask AP': MASK},
        dict(
            pcpvt_small=(42.9, 40.0), pcpvt_base=(44.6, 40.9), pcpvt_large=(45.4, 41.5),
            pvt_tiny=(36.7, 35.1), pvt_small=(40.4, 37.8),
            pvt_medium=(42.0, 39.0), pvt_large=(42.9, 39.5),
            svt_small=(43.4, 40.3), svt_base=(45.2, 41.5), svt_large=(45.9, 41.6),
        ),
    ),
    Recipe(
        'mask_rcnn_{}_3x',
        'Mask R-CNN',
        {'box AP': BOX, 'mask AP': MASK},
        dict(
            pcpvt_small=(46.8, 42.6), pcpvt_base=(47.9, 43.2), pcpvt_large=(),
            svt_small=(46.8, 42.6), svt_base=(48.0, 43.0), svt_large=(),
        ),
    ),
    SEMANTIC_FPN,
    Recipe(
        'upernet_{}',
        'UPerNet',
        {'mIoU': SEMANTIC, 'mIoU(ms+flip)': SEMANTIC},
        dict(
            pcpvt_small=(46.2, 47.5), pcpvt_base=(47.1, 48.4), pcpvt_large=(48.6, 49.8),
            svt_small=(46.2, 47.1), svt_base=(47.7, 48.9), svt_large=(48.8, 50.2),
        ),
    ),
    Recipe('dino_{}', 'DINO', {'box AP': BOX}, dict(pcpvt_small=())),
    Recipe('mask2former_{}', 'Mask2Former', {'mIoU': SEMANTIC}, dict(pcpvt_small=())),
)  # fmt: skip
PAPERS = {  # of the heads, on arXiv
    'RetinaNet': '1708.02002',
    'Mask R-CNN': '1703.06870',
    'Semantic FPN': '1901.02446',
    'UPerNet': '1807.10221',
    'DINO': '2203.03605',
    'Mask2Former': '2112.01527',
}


def model_table() -> str:
    """The table in Markdown: a row for each variant."""
    from cpvt_pyramid import ARCHS

    rows = [
        '| `arch` | published as | parameters | GFLOPs, 224 x 224 | GFLOPs, 800 x 1344 '
        '| ImageNet top-1 | RetinaNet 1x AP | Semantic FPN mIoU |',
        '|---|---|---|---|---|---|---|---|',
    ]
    for arch in ARCHS:
        parameters, *flops = (count_parameters(arch), *(count_flops(arch, *s) for s in SIZES))
        name, _, top1 = BACKBONES.get(arch, ('ours, for demo and tests', '', ''))
        results = [recipe.results.get(arch, ('',))[0] for recipe in (RETINANET_1X, SEMANTIC_FPN)]
        cells = [f'`{arch}`', name, f'{parameters / 1e6:.1f}M']
        cells += [f'{f / 1e9:.1f}' for f in flops] + [str(value) for value in (top1, *results)]
        rows.append('| ' + ' | '.join(cells) + ' |')
    return '\n'.join(rows) + '\n'


SIZES = ((224, 224), (800, 1344))


def count_parameters(arch: str) -> int:
    """Parameters of the backbone."""
    import torch

    from cpvt_pyramid import CPVTPyramid

    with torch.device('meta'):
        return sum(p.numel() for p in CPVTPyramid(arch).parameters())


def count_flops(arch: str, height: int, width: int) -> int:
    """Multiply-additions of a forward pass of one image, which papers call FLOPs."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from cpvt_pyramid import CPVTPyramid

    # The counter does not know the CPU's fused attention; the same as plain products it does.
    with torch.device('meta'), FlopCounterMode(display=False) as counter:
        with sdpa_kernel(SDPBackend.MATH):
            CPVTPyramid(arch)(torch.empty(1, 3, height, width))
    return counter.get_total_flops() // 2


def with_table(text: str) -> str:
    """The README's text with the table of today between its two marks."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + model_table() + END + rest.split(END)[1]


METAFILE_HEADER = """\
# What mim shows of the configs. Made by tools/model_table.py. Results are those published with the
# backbones, not re-run here; there are no weights of whole models. Parameters are counted.
"""


def metafile() -> str:
    """The text of configs/metafile.yml: every config, with its result where one is published."""
    import yaml

    collections = [
        {'Name': head, 'Paper': f'https://arxiv.org/abs/{paper}'} for head, paper in PAPERS.items()
    ]
    content = {'Collections': collections, 'Models': list(models())}
    return METAFILE_HEADER + yaml.safe_dump(content, sort_keys=False, width=100)


def models() -> Iterator[dict]:
    """The entries of the metafile."""
    from mmengine.config import Config

    for recipe in RECIPES:
        for arch, values in recipe.results.items():
            name = recipe.config.format(BACKBONES[arch].short)
            cfg = Config.fromfile(ROOT / 'configs' / f'{name}.py')
            dataset = 'COCO' if cfg.default_scope == 'mmdet' else 'ADE20K'
            epochs, iterations = (cfg.train_cfg.get(key) for key in ('max_epochs', 'max_iters'))
            model = {
                'Name': name,
                'In Collection': recipe.head,
                'Config': f'configs/{name}.py',
                'Metadata': {
                    'Architecture': [*BACKBONES[arch].name.split(', '), recipe.head],
                    'Parameters': count_parameters_of(cfg),
                    'Training Data': dataset,
                    'Batch Size': cfg.auto_scale_lr.base_batch_size,
                    **({'Epochs': epochs} if epochs else {'Iterations': iterations}),
                },
            }
            if values:
                model['Metadata']['Results Source'] = 'published with the backbone, not re-run'
                metrics: dict[str, dict[str, float]] = {}
                for (metric, task), value in zip(recipe.metrics.items(), values):
                    metrics.setdefault(task, {})[metric] = value
                model['Results'] = [
                    {'Task': task, 'Dataset': dataset, 'Metrics': found}
                    for task, found in metrics.items()
                ]
            yield model


def count_parameters_of(cfg: 'Config') -> int:
    """Parameters of the whole model of a config."""
    import torch
    from mmengine.registry import MODELS, init_default_scope

    init_default_scope(cfg.default_scope)
    with torch.device('meta'):
        return sum(p.numel() for p in MODELS.build(cfg.model).parameters())


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog='model_table', description=__doc__)
    parser.add_argument(
        '--write', action='store_true', help='put the table into README.md, write the metafile'
    )
    if parser.parse_args(argv).write:
        README.write_text(with_table(README.read_text()))
        METAFILE.write_text(metafile())
    else:
        print(model_table(), end='')
    return 0


if __name__ == '__main__':
    sys.exit(main())
