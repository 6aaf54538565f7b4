# Semantic FPN with PCPVT-S on scenes of four bands: red, green, blue and near infrared, of 8 or 16
# bits, of any size. An example to start from, nothing is published; see docs/bands.md.
#   cpvt train configs/bands/semantic_fpn_cpvt_s.py --auto-scale-lr
# Data in BANDS_ROOT, or data/bands next to configs/:
#   scenes/train/*.tif, scenes/val/*.tif    bands 1 to 4
#   labels/train/*.tif, labels/val/*.tif    indices of classes, 255 is ignored
_base_ = '../semantic_fpn_cpvt_s.py'
custom_imports = dict(imports=[
    'cpvt_pyramid.mm.segmentation', 'cpvt_pyramid.app.training.hooks',
    'cpvt_pyramid.app.data.bands'])
data_root = '{{$BANDS_ROOT:{{ fileDirname }}/../../data/bands}}'
bands = [1, 2, 3, 4]  # of the files, in the order of the model's channels
classes = ('ground', 'water', 'vegetation', 'building')
palette = [[170, 140, 100], [60, 110, 200], [60, 150, 70], [200, 60, 60]]

model = dict(
    data_preprocessor=dict(
        # Those of your scenes, from gdalinfo -stats. These are of 12-bit samples.
        mean=[520.0, 530.0, 480.0, 1300.0], std=[260.0, 240.0, 230.0, 520.0], bgr_to_rgb=False),
    backbone=dict(in_channels=4, rgb_weights=['red', 'green', 'blue', 'nir']),
    decode_head=dict(num_classes=4),
    test_cfg=dict(mode='slide', crop_size=(512, 512), stride=(384, 384)))

load_bands = dict(type='LoadBands', bands=bands)
train_pipeline = [
    dict(type='LoadBands', bands=bands, tile=(512, 512)),  # at a random place of the scene
    dict(type='LoadTileAnnotations'),
    dict(type='RandomFlip', prob=0.5),
    dict(type='RandomFlip', prob=0.5, direction='vertical'),
    dict(type='PackSegInputs')]
test_pipeline = [load_bands, dict(type='LoadTileAnnotations'), dict(type='PackSegInputs')]
tta_pipeline = [
    load_bands,
    dict(
        type='TestTimeAug',
        transforms=[
            [dict(type='RandomFlip', prob=0.0), dict(type='RandomFlip', prob=1.0)],
            [dict(type='LoadTileAnnotations')],
            [dict(type='PackSegInputs')]])]

scenes = dict(
    _delete_=True, type='BaseSegDataset', data_root=data_root, img_suffix='.tif',
    seg_map_suffix='.tif', metainfo=dict(classes=classes, palette=palette))
train_dataloader = dict(
    dataset=dict(
        **scenes, data_prefix=dict(img_path='scenes/train', seg_map_path='labels/train'),
        pipeline=train_pipeline))
val_dataloader = dict(
    dataset=dict(
        **scenes, data_prefix=dict(img_path='scenes/val', seg_map_path='labels/val'),
        pipeline=test_pipeline))
test_dataloader = val_dataloader

# An epoch would be one tile of each scene: training counts iterations.
train_cfg = dict(max_iters=20_000, val_interval=2_000)
param_scheduler = [
    dict(type='PolyLR', power=0.9, eta_min=1e-6, by_epoch=False, begin=0, end=20_000)]
default_hooks = dict(checkpoint=dict(interval=2_000))
