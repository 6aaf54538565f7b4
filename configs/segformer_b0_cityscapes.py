# SegFormer-B0 on Cityscapes (arXiv 2105.15203): 76.54 mIoU, 78.22 at several scales. The recipe and
# the results are those of MMSegmentation's config, which has 8 images per step.
#   tools/dist_train.sh configs/segformer_b0_cityscapes.py 8
_base_ = [
    '_base_/models/segformer.py', '_base_/datasets/cityscapes.py',
    '_base_/schedules/segformer_160k.py', '_base_/runtime_segmentation.py']
model = dict(
    data_preprocessor=dict(size=(1024, 1024)),
    backbone=dict(
        arch='mit_b0',
        init_cfg=dict(
            type='Pretrained',
            checkpoint='https://mmassets.onedl.ai/mmsegmentation/v0.5/pretrain/'
            'segformer/mit_b0_20220624-7e0fe6dd.pth')),
    decode_head=dict(in_channels=[32, 64, 160, 256], num_classes=19),
    test_cfg=dict(mode='slide', crop_size=(1024, 1024), stride=(768, 768)))
auto_scale_lr = dict(base_batch_size=8)
