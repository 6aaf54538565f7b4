"""Train a segmentor of torchgeo on GeoTIFFs, with a backbone of this package, and evaluate it.

    pip install '.[timm]' torchgeo
    python examples/torchgeo_segmentation.py DATA --num-classes 5

DATA holds train/images, train/labels, val/images and val/labels: GeoTIFFs of one resolution, with
images of 8 bits and three bands, and labels 0 to num_classes - 1, with 255 as nodata, which is
ignored. Images and labels are matched by their coordinates.
"""

import argparse

import lightning
import torch
from torch.utils.data import DataLoader
from torchgeo.datasets import GeoDataset, RasterDataset, stack_samples
from torchgeo.samplers import GridGeoSampler, RandomGeoSampler
from torchgeo.trainers import SemanticSegmentationTask

import cpvt_pyramid.timm_models  # noqa: F401 registers the backbones, in torchgeo tu-NAME

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


def normalize(sample: dict) -> dict:
    image = sample['image'] / 255
    return sample | dict(image=(image - MEAN[:, None, None]) / STD[:, None, None])


class Labels(RasterDataset):
    is_image = False


def scenes(root: str, split: str) -> GeoDataset:
    images = RasterDataset(f'{root}/{split}/images', transforms=normalize)
    return images & Labels(f'{root}/{split}/labels', crs=images.crs, res=images.res)


def tensors(samples: list[dict]) -> dict[str, torch.Tensor]:
    """A batch without the coordinates of its tiles."""
    batch = stack_samples(samples)
    return dict(image=batch['image'], mask=batch['mask'])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('data', help='folder')
    parser.add_argument('--num-classes', type=int, required=True)
    parser.add_argument('--arch', default='pcpvt_small', help='backbone')
    parser.add_argument('--pretrained', action='store_true', help='download its weights')
    parser.add_argument('--size', type=int, default=512, help='side of a tile, a multiple of 32')
    parser.add_argument('--tiles', type=int, default=512, help='random ones in an epoch')
    parser.add_argument('--batch-size', type=int, default=8)
    parser.add_argument('--epochs', type=int, default=50)
    parser.add_argument('--lr', type=float, default=1e-4)
    parser.add_argument('--out', default='torchgeo.ckpt', help='file of the trained weights')
    args = parser.parse_args()
    lightning.seed_everything(0)
    train, val = scenes(args.data, 'train'), scenes(args.data, 'val')
    task = SemanticSegmentationTask(
        model='upernet',
        backbone=f'tu-{args.arch}',
        weights=args.pretrained or None,
        num_classes=args.num_classes,
        ignore_index=255,
        lr=args.lr,
    )
    options = dict(batch_size=args.batch_size, collate_fn=tensors)
    sampler = RandomGeoSampler(train, args.size, length=args.tiles)
    train_loader = DataLoader(train, sampler=sampler, **options)
    val_loader = DataLoader(val, sampler=GridGeoSampler(val, args.size, args.size), **options)
    trainer = lightning.Trainer(max_epochs=args.epochs, log_every_n_steps=1)
    trainer.fit(task, train_loader, val_loader)
    trainer.save_checkpoint(args.out)
    trainer.test(task, val_loader)


if __name__ == '__main__':
    main()
