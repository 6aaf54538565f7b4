"""Train a segmentor on a folder of images and label maps with Lightning, and evaluate it.

    pip install '.[torch,demo]' lightning torchmetrics
    cpvt demo-data pages
    python examples/lightning_segmentation.py

The model is SegFormer's head on any backbone. Images of different sizes are padded to one batch,
and their sizes go to the backbone, whose maps are then those of each image alone.

--trained segformer_b0_ade20k starts from a model that is trained on ADE20K: all but its classifier.
Its weights are for research only; semantic_fpn_cpvt_s_ade20k's are not.
"""

import argparse
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassJaccardIndex
from torchvision.transforms.functional import pil_to_tensor, to_tensor

from cpvt_pyramid import load_trained, load_weights
from cpvt_pyramid.tasks.segmentors import segformer

DATA = Path(__file__).resolve().parents[1] / 'data/pages'
IGNORED = 255
Batch = tuple[Tensor, Tensor, Tensor]  # images, their heights and widths, labels


class MaskFolder(Dataset):
    """Images in [0, 1], ROOT/SPLIT/*.png, with label maps ROOT/masks/SPLIT/*.png, at half of their
    size."""

    def __init__(self, root: str, split: str) -> None:
        self.images = sorted(Path(root, split).glob('*.png'))
        self.labels = [Path(root, 'masks', split, p.name) for p in self.images]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = to_tensor(Image.open(self.images[index]).convert('RGB').reduce(2))
        labels = pil_to_tensor(Image.open(self.labels[index]))[0, ::2, ::2]
        return image, labels.long()


def padded(samples: list[tuple[Tensor, Tensor]]) -> Batch:
    sizes = torch.tensor([labels.shape for _, labels in samples])
    height, width = sizes.amax(0).tolist()
    padding = [(0, width - w, 0, height - h) for h, w in sizes.tolist()]
    images = [F.pad(image, p) for (image, _), p in zip(samples, padding)]
    labels = [F.pad(labels, p, value=IGNORED) for (_, labels), p in zip(samples, padding)]
    return torch.stack(images), sizes, torch.stack(labels)


class Segmentor(lightning.LightningModule):
    def __init__(
        self, arch: str, num_classes: int, lr: float, trained: tuple[str, ...] = ()
    ) -> None:
        """`trained`: the name of a trained model and, perhaps, the path of its file."""
        super().__init__()
        self.save_hyperparameters()
        if trained:
            self.model = load_trained(*trained, num_classes=num_classes).train()
        else:
            self.model = segformer(arch, num_classes=num_classes, channels=64)
        self.iou = MulticlassJaccardIndex(num_classes, ignore_index=IGNORED)

    def training_step(self, batch: Batch, _index: int) -> Tensor:
        images, sizes, labels = batch
        loss = self.model.loss(images, labels, sizes, IGNORED)
        self.log('loss', loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, _index: int) -> None:
        images, sizes, labels = batch
        self.iou(self.model(images, sizes), labels)
        self.log('mIoU', self.iou, prog_bar=True)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), self.hparams.lr, weight_decay=1e-4)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, steps)
        return dict(optimizer=optimizer, lr_scheduler=dict(scheduler=scheduler, interval='step'))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--data', default=DATA, help='folder with images and masks')
    parser.add_argument('--num-classes', type=int, default=6)
    parser.add_argument('--arch', default='pcpvt_nano', help='backbone')
    parser.add_argument('--weights', help='checkpoint of the backbone')
    parser.add_argument(
        '--trained', nargs='+', default=(), help='a trained model (cpvt models), perhaps its file'
    )
    parser.add_argument('--epochs', type=int, default=16)
    parser.add_argument('--lr', type=float, default=1e-3, help='highest learning rate')
    parser.add_argument('--out', default='segmentor.ckpt', help='file of the trained weights')
    args = parser.parse_args()
    lightning.seed_everything(0)
    train, val = MaskFolder(args.data, 'train'), MaskFolder(args.data, 'val')
    segmentor = Segmentor(args.arch, args.num_classes, args.lr, tuple(args.trained))
    if args.weights:
        load_weights(segmentor.model.backbone, args.weights)
    options = dict(batch_size=8, num_workers=2, collate_fn=padded)
    train_loader = DataLoader(train, shuffle=True, drop_last=True, **options)
    trainer = lightning.Trainer(max_epochs=args.epochs, gradient_clip_val=5.0, log_every_n_steps=1)
    trainer.fit(segmentor, train_loader, DataLoader(val, **options))
    trainer.save_checkpoint(args.out)


if __name__ == '__main__':
    main()
