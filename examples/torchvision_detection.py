"""Train a RetinaNet on data in COCO's layout with torchvision, without OpenMMLab, and evaluate it.

    pip install '.[torch,demo]' pycocotools
    cpvt demo-data pages
    python examples/torchvision_detection.py

The model is as small as that of configs/demo/pages_retinanet_cpvt_nano.py. --trained starts from a
detector that is trained on COCO instead, all but the layer that classifies:

    cpvt demo-data trees
    python examples/torchvision_detection.py --data data/trees --side 512 \\
      --trained retinanet_pvt_v2_b0_coco --steps 500 --lr 1e-4

This was not tried with the published weights: they could not be downloaded here.
"""

import argparse
from itertools import chain, repeat
from pathlib import Path

import torch
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.functional import to_tensor
from tqdm import tqdm

from cpvt_pyramid import load_trained, load_weights
from cpvt_pyramid.tasks.detectors import retinanet

DATA = Path(__file__).resolve().parents[1] / 'data/pages'
DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'


class CocoFolder(Dataset):
    """Images in [0, 1] with their id, boxes x1 y1 x2 y2, and labels from 0."""

    def __init__(self, root: str, split: str) -> None:
        self.coco = COCO(f'{root}/annotations/instances_{split}.json')
        self.folder, self.ids = f'{root}/{split}', sorted(self.coco.imgs)
        self.categories = sorted(self.coco.cats)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, dict]:
        image_id = self.ids[index]
        path = f'{self.folder}/{self.coco.imgs[image_id]["file_name"]}'
        image = to_tensor(Image.open(path).convert('RGB'))
        found = [a for a in self.coco.imgToAnns[image_id] if not a['iscrowd']]
        found = [a for a in found if min(a['bbox'][2:]) > 0]
        boxes = torch.tensor([a['bbox'] for a in found], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        labels = [self.categories.index(a['category_id']) for a in found]
        return image, {'id': image_id, 'boxes': boxes, 'labels': torch.tensor(labels).long()}


def build(args: argparse.Namespace, num_classes: int) -> torch.nn.Module:
    """A trained model with a new classifier, or a small one."""
    side = args.side
    min_size = (*range(side * 3 // 4, side * 5 // 4 + 1, 16), side)  # the last for evaluation
    max_size = side * 5 // 3
    if args.trained:
        model = load_trained(*args.trained, num_classes=num_classes, drop_path_rate=0.1)
        model.transform.min_size, model.transform.max_size = min_size, max_size
        return model
    model = retinanet(
        args.arch,
        num_classes=num_classes,
        out_channels=64,
        extra_levels=1,
        head_convs=2,
        min_size=min_size,
        max_size=max_size,
    )
    if args.weights:
        load_weights(model.backbone.body, args.weights)
    return model


def train(model: torch.nn.Module, data: CocoFolder, steps: int, lr: float, batch_size: int) -> None:
    loader = DataLoader(
        data, batch_size, shuffle=True, drop_last=True, num_workers=2, collate_fn=list
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps, pct_start=0.2)
    progress = tqdm(zip(range(steps), chain.from_iterable(repeat(loader))), total=steps)
    for _, batch in progress:
        images = [image.to(DEVICE) for image, _ in batch]
        targets = [{k: target[k].to(DEVICE) for k in ('boxes', 'labels')} for _, target in batch]
        losses = model(images, targets)
        optimizer.zero_grad()
        sum(losses.values()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        scheduler.step()
        progress.set_postfix({name: f'{loss.item():.3f}' for name, loss in losses.items()})


@torch.inference_mode()
def evaluate(model: torch.nn.Module, data: CocoFolder) -> None:
    results = []
    for batch in tqdm(DataLoader(data, 8, collate_fn=list)):
        for (_, target), found in zip(batch, model([image.to(DEVICE) for image, _ in batch])):
            found['boxes'][:, 2:] -= found['boxes'][:, :2]
            rows = zip(found['boxes'].tolist(), found['scores'].tolist(), found['labels'].tolist())
            results += [
                dict(image_id=target['id'], category_id=data.categories[c], bbox=box, score=score)
                for box, score, c in rows
            ]
    if not results:  # which pycocotools cannot evaluate
        print('no boxes found')
        return
    evaluation = COCOeval(data.coco, data.coco.loadRes(results), 'bbox')
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--data', default=DATA, help="folder in COCO's layout")
    parser.add_argument(
        '--splits', nargs=2, default=('train', 'val'), help='of instances_SPLIT.json'
    )
    parser.add_argument('--arch', default='pcpvt_nano', help='backbone')
    parser.add_argument('--weights', help='checkpoint of the backbone')
    parser.add_argument(
        '--trained', nargs='+', help='a trained model (cpvt models), perhaps its file; no --arch'
    )
    parser.add_argument('--side', type=int, default=288, help='shorter side of images, in pixels')
    parser.add_argument('--batch-size', type=int, default=8)
    parser.add_argument('--steps', type=int, default=1200, help='of a batch each')
    parser.add_argument('--lr', type=float, default=1.5e-3, help='highest learning rate')
    parser.add_argument('--out', default='retinanet.pth', help='file of the trained weights')
    args = parser.parse_args()
    torch.manual_seed(0)
    train_data, val_data = (CocoFolder(args.data, split) for split in args.splits)
    model = build(args, len(train_data.categories)).to(DEVICE)
    train(model.train(), train_data, args.steps, args.lr, args.batch_size)
    torch.save(model.state_dict(), args.out)
    evaluate(model.eval(), val_data)


if __name__ == '__main__':
    main()
