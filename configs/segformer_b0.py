# SegFormer-B0 on ADE20K (arXiv 2105.15203): 37.41 mIoU, 38.34 at several scales. The recipe and the
# results are those of MMSegmentation's config.
#   tools/dist_train.sh configs/segformer_b0.py 8
_base_ = [
    '_base_/models/segformer.py', '_base_/datasets/ade20k.py',
    '_base_/schedules/segformer_160k.py', '_base_/runtime_segmentation.py']
model = dict(
    backbone=dict(
        arch='mit_b0',
        init_cfg=dict(
            type='Pretrained',
            checkpoint='https://mmassets.onedl.ai/mmsegmentation/v0.5/pretrain/'
            'segformer/mit_b0_20220624-7e0fe6dd.pth')),
    decode_head=dict(in_channels=[32, 64, 160, 256]))
train_dataloader = dict(batch_size=2)
