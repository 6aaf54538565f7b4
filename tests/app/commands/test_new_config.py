"""The sample data set in every layout becomes a config that loads, builds and trains."""

import inspect
import itertools
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import layouts
import mmdet
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import DATASETS, MODELS, PARAM_SCHEDULERS, init_default_scope
from small_data import CLASSES
from support import ROOT, load_tool

from cpvt_pyramid.app.commands import new_config as command
from cpvt_pyramid.app.config import check as checks
from cpvt_pyramid.app.config.load import load_config
from cpvt_pyramid.app.config.shipped import shipped_configs
from cpvt_pyramid.app.data.adapt import Code, set_classes, text_of_settings
from cpvt_pyramid.app.data.data import coco_of_split
from cpvt_pyramid.app.data.defects import Defects
from cpvt_pyramid.app.data.new_config import find_base, new_config
from cpvt_pyramid.app.data.read import read_data
from cpvt_pyramid.app.data.recipes import Scales, adapted_recipe
from cpvt_pyramid.app.data.recognize import describe, found_in_folder
from cpvt_pyramid.app.data.splits import split_of
from cpvt_pyramid.app.tooling.command import UserError

BASES = ROOT / 'configs'
DETECTOR = BASES / 'demo/pages_retinanet_cpvt_nano.py'
SEGMENTOR = BASES / 'demo/pages_semantic_fpn_cpvt_nano.py'


def made(data: Path, base: Path, out: Path) -> Config:
    """The loaded config for a folder."""
    new_config(data, base, out, skip_bad=False, overwrite=False)
    return load_config(out)


def test_coco(sample_dataset, tmp_path):
    """A file is used where it is, unless its categories have another order than those of the others
    or it has to be divided, which is done by image, and each time in the same way."""
    root = shutil.copytree(sample_dataset / 'coco', tmp_path / 'data')
    train, val = (root / f'annotations/instances_{split}2017.json' for split in ('train', 'val'))
    cfg = made(root, DETECTOR, tmp_path / 'my.py')
    assert Path(cfg.data_root, cfg.train_dataloader.dataset.ann_file).samefile(train)
    assert not (tmp_path / 'my_data').exists()
    assert cfg.model.bbox_head.num_classes == 10
    assert cfg.train_dataloader.dataset.filter_cfg == dict(filter_empty_gt=False, min_size=1)

    content = json.loads(val.read_text())
    content['categories'].reverse()
    val.write_text(json.dumps(content))
    data = read_data(describe(root, ['coco']).description, Defects())
    found = [coco_of_split(split, data.classes) for split in data.splits.values()]
    assert [c['categories'][0]['name'] for c in found] == ['ant', 'ant']
    counts = [sum(a['category_id'] == 1 for a in c['annotations']) for c in (content, found[1])]
    assert counts[0] == counts[1] > 0

    val.unlink()
    train.rename(root / 'all of it.json')
    parts = []
    for number in range(2):
        lines = new_config(root, DETECTOR, tmp_path / f'my{number}.py', False, False)
        assert any('no validation data: 1 training image,' in line for line in lines)
        files = [tmp_path / f'my{number}_data/{split}.json' for split in ('train', 'val')]
        parts.append([json.loads(file.read_text()) for file in files])
    assert parts[0] == parts[1]
    names = [{image['file_name'] for image in part['images']} for part in parts[0]]
    assert len(names[0]) == 7 and len(names[1]) == 1 and not names[0] & names[1]
    for part in parts[0]:
        ids = {image['id'] for image in part['images']}
        assert part['annotations'] and {a['image_id'] for a in part['annotations']} <= ids


# Label maps


def test_ade_layout(sample_dataset, tmp_path):
    base = tmp_path / 'base.py'
    weights = 'model = dict(decode_head=dict(loss_decode=dict(class_weight=[0.1] * 6)))'
    base.write_text(f"_base_ = '{SEGMENTOR}'\n{weights}\n")
    cfg = made(sample_dataset / 'ade', base, tmp_path / 'my.py')
    assert cfg.metainfo.classes == ('background', *CLASSES)
    assert len(cfg.metainfo.palette) == 1 + len(CLASSES) and len(cfg.metainfo.palette[0]) == 3
    dataset = cfg.train_dataloader.dataset
    assert dataset.reduce_zero_label and dataset.data_prefix.img_path.endswith('images')
    assert cfg.model.decode_head.loss_decode.class_weight is None  # was for other classes


@pytest.mark.parametrize(
    'image, mask, suffixes',
    [
        ('CamVid/train/0001.png', 'CamVid/train_labels/0001_L.png', ('', '_L')),
        ('valid/a_jpg.rf.12.jpg', 'valid/a_jpg.rf.12_mask.png', ('', '_mask')),
        ('scene 1/images/a b.tif', 'scene 1/masks/a b.tif', ('', '')),
        ('images/play_ground.jpg', 'masks/play_ground.png', ('', '')),
        ('images/a_seg.jpg', 'masks/a_seg_mask.png', ('', '_mask')),
        ('images/a_img.jpg', 'masks/a.png', ('_img', '')),
        ('train/on_target.jpg', 'train_masks/on_target.png', ('', '')),
        ('images/a.jpg', 'images/a_mask.png', ('', '_mask')),
    ],
)
def test_images_and_masks_by_name(image, mask, suffixes, tmp_path):
    """Which files belong together. Folders of images say what is an image."""
    layouts.SCENES[0].write(tmp_path / image)
    layouts.label_map(tmp_path / mask, layouts.SCENES[0])
    layouts.write(tmp_path / 'classes.txt', 'ground\ncat\ndog\nowl')
    settings = found_in_folder(tmp_path, ['masks']).settings
    (split,) = {'train', 'val'} & {*settings}
    assert settings[split] == os.path.dirname(image)
    assert settings['annotations'][split] == os.path.dirname(mask)
    assert (settings.get('image_suffix', ''), settings.get('mask_suffix', '')) == suffixes


def test_splits_by_name():
    names = ['instances_train2017.json', 'a/valid/x.json', 'TestSet/x.json', 'constrain.json', '']
    assert list(map(split_of, names)) == ['train', 'val', 'test', None, None]


# Configs


@pytest.mark.parametrize(
    'base, write',
    [
        ('retinanet_svt_s.py', layouts.voc_of_2007),
        ('mask_rcnn_cpvt_s_3x.py', layouts.yolo_of_roboflow),
        ('dino_cpvt_s.py', layouts.yolo_of_splits),
        ('mask2former_cpvt_s.py', layouts.maps_in_colors),
        ('semantic_fpn_columnar_cpvt_ti.py', layouts.maps_in_gray),
        ('upernet_cpvt_s.py', layouts.maps_of_mmseg_named),
    ],
)
def test_heads_and_data_of_every_recipe_agree(base, write, tmp_path):
    write(tmp_path / 'data')
    cfg = made(tmp_path / 'data', BASES / base, tmp_path / 'mon été.py')
    checks.check_data(cfg, 'train', 'val', 'test')
    init_default_scope(cfg.default_scope)
    with torch.device('meta'):
        model = MODELS.build(cfg.model)
    checks.check_classes(cfg, model, 'train', 'val', 'test')


@pytest.mark.parametrize(
    'base, write, options',
    [
        (
            DETECTOR,
            layouts.voc_of_2007,
            ['train_cfg.max_epochs=1', 'param_scheduler.0.total_steps=1'],
        ),
        (
            SEGMENTOR,
            layouts.maps_in_colors,
            ['train_cfg.max_iters=1', 'model.backbone.init_cfg=None'],
        ),
    ],
)
def test_training(base, write, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # mmengine formats the config three times, which takes longer than this training.
    monkeypatch.setattr('yapf.yapflib.yapf_api.FormatCode', lambda text, **_: (text, True))
    root = tmp_path / 'data'
    write(root)
    tool = load_tool('new_config')
    assert tool.main([str(root), '--base', str(base), '--out', 'configs here/my.py']) == 0
    settings = 'num_workers=0', 'persistent_workers=False', 'batch_size=1', 'dataset.indices=1'
    workers = [f'{split}_dataloader.{s}' for split in ('train', 'val') for s in settings]
    command = ['configs here/my.py', '--work-dir', 'run', '--cfg-options', *workers, *options]
    assert load_tool('train').main(command) == 0
    assert list(Path('run').glob('*_1.pth'))


def test_nothing_is_overwritten_without_being_told(tmp_path):
    """Nor written for a base that does not fit the data."""
    root = tmp_path / 'data'
    layouts.voc_of_folders(root)
    out, files = root / 'my.py', {*root.iterdir()}  # what is written to the folder is no data
    for base, complaint in (
        (BASES / 'mask_rcnn_cpvt_s.py', 'masks are trained, but .* has boxes only'),
        (SEGMENTOR, 'has data in the format voc, but masks is asked for'),
    ):
        with pytest.raises(UserError, match=complaint):
            new_config(root, base, out, False, False)
        assert {*root.iterdir()} == files
    new_config(root, DETECTOR, out, False, False)
    before = out.read_text(), (root / 'my_data/train.json').read_text()
    with pytest.raises(UserError, match='--overwrite'):
        new_config(root, DETECTOR, out, False, False)
    (root / 'my_data/thesis.txt').write_text('mine')
    new_config(root, DETECTOR, out, False, True)
    assert (out.read_text(), (root / 'my_data/train.json').read_text()) == before
    assert (root / 'my_data/thesis.txt').read_text() == 'mine'


def test_classes_of_nested_heads():
    """Of a cascade and of a panoptic head, whose last weight is that of no object."""
    weights = [1.0] * 133 + [0.1]
    model = dict(
        backbone=dict(num_classes=1000),
        rpn_head=dict(num_classes=1),
        roi_head=dict(bbox_head=[dict(num_classes=80), dict(num_classes=80)]),
        panoptic_head=dict(
            num_things_classes=80, num_stuff_classes=53, loss_cls=dict(class_weight=weights)
        ),
    )
    set_classes(model, 3)
    assert model['backbone']['num_classes'] == 1000 and model['rpn_head']['num_classes'] == 1
    assert [head['num_classes'] for head in model['roi_head']['bbox_head']] == [3, 3]
    panoptic = model['panoptic_head']
    assert (panoptic['num_things_classes'], panoptic['num_stuff_classes']) == (3, 0)
    assert panoptic['loss_cls']['class_weight'].text == '[1.0] * 3 + [0.1]'


def test_schedules():
    detection = Config.fromfile(BASES / 'mask_rcnn_cpvt_s.py')
    small, large = (adapted_recipe(detection, images) for images in (500, 118_000))
    settings = small.settings
    assert settings['optim_wrapper']['optimizer']['lr'] == 2.5e-5  # 2 images instead of 16
    assert settings['train_cfg']['max_epochs'] == 96 and '24000 iterations' in small.line
    assert settings['param_scheduler'][0]['end'] == 500  # the warm-up
    assert settings['param_scheduler'][1]['milestones'] == [64, 88]
    assert large.line.startswith('training: 12 epochs, 708000 iterations')
    upernet = Config.fromfile(BASES / 'upernet_cpvt_s.py')
    tiny = adapted_recipe(upernet, 10).settings  # 300 epochs of 5 steps
    assert tiny['train_cfg']['max_iters'] == 1500
    assert [(s['begin'], s['end']) for s in tiny['param_scheduler']] == [(0, 14), (14, 1500)]


def test_configs_do_not_depend_on_the_machine(tmp_path, monkeypatch):
    """Neither on its GPU nor on its number of cores."""
    layouts.coco_of_splits(tmp_path / 'data')
    texts = []
    for number, cores in enumerate((1, 64)):
        monkeypatch.setattr(os, 'cpu_count', lambda cores=cores: cores)
        monkeypatch.setattr(torch.cuda, 'is_available', lambda cores=cores: cores > 1)
        gpu = SimpleNamespace(total_memory=80 * 2**30)
        monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda _, gpu=gpu: gpu)
        new_config(tmp_path / 'data', DETECTOR, tmp_path / 'my.py', overwrite=number > 0)
        texts.append((tmp_path / 'my.py').read_text())
    assert texts[0] == texts[1]


def test_eight_images_are_no_reason_for_thousands_of_epochs():
    cfg = Config.fromfile(BASES / 'retinanet_cpvt_s.py')
    cfg.train_dataloader.batch_size = 8
    recipe = adapted_recipe(cfg, 8)
    assert recipe.settings['train_cfg']['max_epochs'] == 300
    cfg.train_cfg.max_epochs = 500  # that of the base, if it is longer
    assert adapted_recipe(cfg, 8).settings['train_cfg']['max_epochs'] == 500


@pytest.mark.parametrize(
    'base', [DETECTOR, BASES / 'semantic_fpn_cpvt_s.py'], ids=['epochs', 'iterations']
)
@pytest.mark.parametrize('images', [3, 40])
def test_a_tenth_of_a_training_is_evaluated(base, images):
    """The base of the demo evaluates after a half and at the end."""
    loop = adapted_recipe(Config.fromfile(base), images).settings['train_cfg']
    length = loop.get('max_epochs') or loop.get('max_iters')
    assert 0.09 < loop['val_interval'] / length <= 0.1


def test_everything_that_counts_is_scaled():
    """Loops and schedulers, by one factor; warm-ups in iterations stay, if there is time."""
    cfg = Config.fromfile(BASES / 'retinanet_cpvt_s.py')
    cfg.auto_scale_lr.base_batch_size = 4
    cfg.train_cfg.update(max_epochs=12, val_interval=2, val_begin=6, dynamic_intervals=[(10, 1)])
    cfg.param_scheduler = [
        dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=500),
        dict(type='CosineRestartLR', periods=[4, 8], restart_weights=[1, 0.5], by_epoch=True),
        dict(type='StepLR', step_size=3, begin=1, end=12),
        dict(type='ExponentialLR', gamma=0.9),
    ]
    settings = adapted_recipe(cfg, 200).settings  # 60 epochs of 100 steps
    loop = settings['train_cfg']
    assert loop['max_epochs'] == 60 and loop['val_interval'] == 6 and loop['val_begin'] == 30
    assert loop['dynamic_intervals'] == [[50, 5]]
    assert settings['default_hooks']['checkpoint']['interval'] == 6
    warm_up, restarts, steps, decay = settings['param_scheduler']
    assert warm_up['end'] == 500 and restarts['periods'] == [20, 40]
    assert (steps['step_size'], steps['begin'], steps['end']) == (15, 5, 60)
    assert decay['gamma'] ** 60 == pytest.approx(0.9**12)


@pytest.mark.parametrize(
    'resize, before, after',
    [
        (dict(type='Resize', scale=(1333, 800)), (1333, 800), (833, 500)),
        (dict(type='Resize', scale=800), (800, 800), 667),
        (dict(type='ResizeShortestEdge', scale=800, max_size=1333), (1333, 800), 500),
        (dict(type='Resize', scale=0.5), (), 0.5),
    ],
)
def test_scales_of_one_number(resize, before, after):
    """For images of 400 x 300 pixels, which would be enlarged by more than 5/3."""
    loader = dict(dataset=dict(pipeline=[resize]))
    scales = Scales.of(Config({'val_dataloader': loader}), np.array([[300, 400]] * 3), 'detection')
    assert scales.before == before
    assert scales.pipeline([resize], False)[0].get('scale') == after
    line = scales.line(np.array([[300, 400]]), np.array([[20, 300, 400]]))
    assert ('resized to' in line) == bool(before)


def test_text_can_be_read_back():
    value = dict(
        a=[dict(type='X', scales=[(n, 1333) for n in range(40)])],
        b=(1,),
        c='ö \'" {x}',
        d=[],
        e={'with space': None, '1': True},
        f=tuple('long name' for _ in range(20)),
    )
    text = text_of_settings({'x': value, 'y': Code('x')}, {'x': 'two\n# lines'})
    read = Config.fromstring(text, '.py')
    assert read.x == value and read.y == value and '\n# two\n# lines\nx = ' in text


# Bases that are not ours

MMDET = Path(mmdet.__file__).parent / '.mim/configs'


def test_a_base_that_joins_images_keeps_its_pipelines(tmp_path):
    """Those of the data set and of the one around it, at the sizes on which both rely."""
    layouts.coco_of_splits(tmp_path / 'data')
    base = MMDET / 'yolox/yolox_tiny_8xb8-300e_coco.py'
    cfg = made(tmp_path / 'data', base, tmp_path / 'my.py')
    before = Config.fromfile(base).train_dataloader.dataset
    dataset = cfg.train_dataloader.dataset
    assert dataset.type == 'MultiImageMixDataset' and dataset.pipeline == before.pipeline
    assert dataset.dataset.type == 'CocoDataset' and dataset.dataset.pipeline
    init_default_scope('mmdet')
    assert {*DATASETS.build(dataset)[0]} == {'inputs', 'data_samples'}


@pytest.mark.parametrize(
    'name, kinds',
    [
        ('lvis/mask-rcnn_r50_fpn_sample1e-3_ms-1x_lvis-v1.py', ['ClassBalancedDataset']),
        ('pascal_voc/faster-rcnn_r50_fpn_1x_voc0712.py', ['RepeatDataset']),
    ],
)
def test_a_base_with_data_sets_around_others(name, kinds, tmp_path):
    layouts.coco_of_splits(tmp_path / 'data')
    dataset = made(tmp_path / 'data', MMDET / name, tmp_path / 'my.py').train_dataloader.dataset
    found = []
    while 'dataset' in dataset:
        found.append(dataset.type)
        dataset = dataset.dataset
    assert found == kinds and dataset.type == 'CocoDataset'


@pytest.mark.parametrize(
    'name, reason',
    [
        (
            'soft_teacher/soft-teacher_faster-rcnn_r50-caffe_fpn_180k_semi-0.1-coco.py',
            'trains on 2 data sets with pipelines of their own',
        ),
        ('fast_rcnn/fast-rcnn_r50_fpn_1x_coco.py', 'trains on proposals in files'),
    ],
)
def test_bases_that_are_refused_with_the_reason(name, reason, tmp_path):
    layouts.coco_of_splits(tmp_path / 'data')
    with pytest.raises(UserError, match=reason):
        new_config(tmp_path / 'data', MMDET / name, tmp_path / 'my.py')
    assert not (tmp_path / 'my.py').exists()


def test_weights_of_classes_in_several_losses():
    losses = [dict(class_weight=[1.0, 2.0]), dict(type='BoundaryLoss')]
    head = dict(num_classes=2, loss_decode=losses)
    set_classes(dict(decode_head=head), 4)
    assert losses[0]['class_weight'] is None


# The base by its name, and the length of the training


def expanded(pattern: str) -> list[str]:
    """The names that a pattern such as `a_{b,c}` stands for."""
    parts = re.split(r'\{(.*?)\}', pattern)
    choices = [part.split(',') if index % 2 else [part] for index, part in enumerate(parts)]
    return [''.join(words) for words in itertools.product(*choices)]


def test_help_lists_the_bases():
    text = inspect.getdoc(command)
    patterns = re.findall(r'^ {8}([a-z]\S*|\{\S+)$', text, re.M)
    names = [name for pattern in patterns for name in expanded(pattern)]
    assert sorted(names) == sorted(shipped_configs())


def test_a_base_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # without a folder configs
    expected = BASES / 'retinanet_cpvt_s.py'
    for base in ('retinanet_cpvt_s', 'retinanet_cpvt_s.py', 'configs/retinanet_cpvt_s.py'):
        assert find_base(base).samefile(expected)
    assert find_base('configs/demo/trees_retinanet_cpvt_nano.py').parent.name == 'demo'
    Path('retinanet_cpvt_s').touch()
    assert find_base('retinanet_cpvt_s') == Path('retinanet_cpvt_s')  # a file comes first
    for base in ('retinanet_cvpt_s', 'elsewhere/retinanet_cpvt_b.py'):
        with pytest.raises(UserError, match=f'^no config at {base}; .*, such as retinanet_cpvt_'):
            find_base(base)
    with pytest.raises(UserError, match=r'of this package \(cpvt new-config --help lists them\)$'):
        find_base('???')


@pytest.mark.parametrize(
    'base, images, epochs, length, reason',
    [
        ('retinanet_cpvt_s', 9, None, 300, 'with few images, 300 epochs at most'),
        ('retinanet_cpvt_s', 500, None, 96, 'as many images as 3000 steps of the base, 48000'),
        ('retinanet_cpvt_s', 118_000, None, 12, 'the 12 epochs of the base'),
        ('retinanet_cpvt_s', 9, 1, 1, '1 epoch, as given'),
        ('upernet_cpvt_s', 10, None, 1500, 'with few images, 300 epochs at most'),
        ('upernet_cpvt_s', 300, None, 24_000, 'as many images as 3000 steps of the base, 48000'),
        ('upernet_cpvt_s', 5000, None, 250_000, '100 epochs'),
        ('upernet_cpvt_s', 10, 2, 10, '2 epochs, as given'),
    ],
)
def test_the_length_and_why(base, images, epochs, length, reason):
    recipe = adapted_recipe(Config.fromfile(BASES / f'{base}.py'), images, epochs)
    loop = recipe.settings['train_cfg']
    assert loop.get('max_epochs', loop.get('max_iters')) == length
    assert recipe.reason.startswith(f'length: {reason}; --epochs sets another')


@pytest.mark.parametrize(
    'base', ['upernet_cpvt_s', 'retinanet_cpvt_s', 'demo/pages_semantic_fpn_cpvt_nano']
)
@pytest.mark.parametrize('images', [1, 4, 30])
def test_every_schedule_ends_after_it_begins(base, images):
    """As mmengine asks for, also in a training of one iteration."""
    recipe = adapted_recipe(Config.fromfile(BASES / f'{base}.py'), images, epochs=1)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for settings in recipe.settings['param_scheduler']:
        PARAM_SCHEDULERS.build(settings, default_args=dict(optimizer=optimizer))


def test_a_training_of_one_iteration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    layouts.maps_of_folders(tmp_path / 'data')
    Path('data/classes.txt').write_text('\n'.join(('ground', *layouts.CLASSES)))
    tool = load_tool('new_config')
    options = ['--base', str(SEGMENTOR), '--out', 'my.py', '--epochs', '1']
    assert tool.main(['data', *options]) == 0
    settings = 'num_workers=0', 'persistent_workers=False'
    workers = [f'{split}_dataloader.{s}' for split in ('train', 'val') for s in settings]
    assert load_tool('train').main(['my.py', '--cfg-options', *workers]) == 0
    assert Path('work_dirs/my/iter_1.pth').exists()


def test_epochs_are_an_option(tmp_path, capsys):
    layouts.yolo_of_splits(tmp_path / 'data')
    options = ['--base', 'trees_retinanet_cpvt_nano', '--out', str(tmp_path / 'my.py')]
    assert command.main([str(tmp_path / 'data'), *options, '--epochs', '2']) == 0
    assert 'length: 2 epochs, as given;' in capsys.readouterr().out
    cfg = Config.fromfile(tmp_path / 'my.py')
    assert cfg.train_cfg.max_epochs == 2 and cfg.train_cfg.val_interval == 1
    assert cfg.param_scheduler[0].total_steps == 2
