"""Train a segmentor on a folder of images and label maps with Lightning, and evaluate it.

    pip install '.[torch,demo]' lightning torchmetrics
    cpvt demo-data pages
    python examples/lightning_segmentation.py

Images of different sizes are padded to one batch, and their sizes go to the backbone. Its maps are
then those of each image alone, and so are the logits: nothing after it mixes pixels.
"""

import argparse
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassJaccardIndex
from torchvision.transforms.functional import normalize, pil_to_tensor, to_tensor

from cpvt_pyramid import CPVTPyramid, load_weights

DATA = Path(__file__).resolve().parents[1] / 'data/pages'
IGNORED = 255
Batch = tuple[Tensor, Tensor, Tensor]  # images, their heights and widths, labels


class MaskFolder(Dataset):
    """Normalized images ROOT/SPLIT/*.png, with label maps ROOT/masks/SPLIT/*.png, at half of their
    size."""

    def __init__(self, root: str, split: str) -> None:
        self.images = sorted(Path(root, split).glob('*.png'))
        self.labels = [Path(root, 'masks', split, p.name) for p in self.images]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = to_tensor(Image.open(self.images[index]).convert('RGB').reduce(2))
        labels = pil_to_tensor(Image.open(self.labels[index]))[0, ::2, ::2]
        return normalize(image, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]), labels.long()


def padded(samples: list[tuple[Tensor, Tensor]]) -> Batch:
    sizes = torch.tensor([labels.shape for _, labels in samples])
    height, width = sizes.amax(0).tolist()
    padding = [(0, width - w, 0, height - h) for h, w in sizes.tolist()]
    images = [F.pad(image, p) for (image, _), p in zip(samples, padding)]
    labels = [F.pad(labels, p, value=IGNORED) for (_, labels), p in zip(samples, padding)]
    return torch.stack(images), sizes, torch.stack(labels)


class PixelClassifier(nn.Module):
    """Each map of the backbone is classified pixel by pixel, and enlarged by repetition; logits are
    the sum."""

    def __init__(self, arch: str, num_classes: int) -> None:
        super().__init__()
        self.backbone = CPVTPyramid(arch)
        channels = self.backbone.channels
        self.classifiers = nn.ModuleList(nn.Conv2d(dim, num_classes, 1) for dim in channels)

    def forward(self, images: Tensor, sizes: Tensor | None = None) -> Tensor:
        height, width = images.shape[2:]
        maps = self.backbone(images, sizes)
        logits = []
        for x, classifier, stride in zip(maps, self.classifiers, self.backbone.strides):
            enlarged = F.interpolate(classifier(x), scale_factor=stride)
            logits.append(enlarged[:, :, :height, :width])
        return sum(logits)


class Segmentor(lightning.LightningModule):
    def __init__(self, arch: str, num_classes: int, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = PixelClassifier(arch, num_classes)
        self.iou = MulticlassJaccardIndex(num_classes, ignore_index=IGNORED)

    def training_step(self, batch: Batch, _index: int) -> Tensor:
        images, sizes, labels = batch
        logits = self.model(images, sizes)
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORED)
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
    parser.add_argument('--epochs', type=int, default=16)
    parser.add_argument('--lr', type=float, default=1e-3, help='highest learning rate')
    parser.add_argument('--out', default='segmentor.ckpt', help='file of the trained weights')
    args = parser.parse_args()
    lightning.seed_everything(0)
    train, val = MaskFolder(args.data, 'train'), MaskFolder(args.data, 'val')
    segmentor = Segmentor(args.arch, args.num_classes, args.lr)
    if args.weights:
        load_weights(segmentor.model.backbone, args.weights)
    options = dict(batch_size=8, num_workers=2, collate_fn=padded)
    train_loader = DataLoader(train, shuffle=True, drop_last=True, **options)
    trainer = lightning.Trainer(max_epochs=args.epochs, gradient_clip_val=5.0, log_every_n_steps=1)
    trainer.fit(segmentor, train_loader, DataLoader(val, **options))
    trainer.save_checkpoint(args.out)


if __name__ == '__main__':
    main()
