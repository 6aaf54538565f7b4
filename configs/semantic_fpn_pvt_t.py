# Semantic FPN on ADE20K with PVT-Tiny, version 1 (arXiv 2102.12122): 35.7 mIoU. The recipe is the
# paper's: 80,000 iterations of 16 images. The authors' later config has half the iterations and
# twice the images and learning rate, and reaches 36.6 mIoU.
#   tools/dist_train.sh configs/semantic_fpn_pvt_t.py 8
_base_ = [
    '_base_/models/semantic_fpn.py', '_base_/datasets/ade20k.py',
    '_base_/schedules/segmentation_80k.py', '_base_/runtime_segmentation.py']
model = dict(
    backbone=dict(
        arch='pvt_tiny', drop_path_rate=0.1,
        init_cfg=dict(
            type='Pretrained',
            checkpoint='https://github.com/whai362/PVT/releases/download/v2/pvt_tiny.pth')))
train_dataloader = dict(batch_size=2)
param_scheduler = [dict(type='PolyLR', power=0.9, eta_min=0.0, by_epoch=False, end=80_000)]
auto_scale_lr = dict(base_batch_size=16)
