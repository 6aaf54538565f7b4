"""One training of a detector of trees, and what it finds in photographs that it has not seen."""

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from cpvt_pyramid.tooling.command import UserError
from cpvt_pyramid.tooling.files import write_text

CONFIG = Path(__file__).parents[2] / 'configs/demo/trees_retinanet_cpvt_nano.py'
PHOTOGRAPHS = {  # each at its own size; by name, the split and the file
    'Yellowstone': ('whole', '2019_YELL_2_541000_4977000_image_crop.png'),
    'Florida': ('test', 'OSBS_029.png'),
    'California': ('test', 'SOAP_061.png'),
}
MEASURES = ('AP', 'AP50', 'recall', 'precision')
CROP = 256  # side of the training crops, in pixels
MATCH_IOU = 0.4  # of DeepForest's evaluation
SCORE = 0.3

ARMS = {  # by name, what it changes in the config
    'distilled': [],
    'scratch': ['model.backbone.init_cfg=None'],
    'resnet18': [
        'model.data_preprocessor.type=DetDataPreprocessor',  # a ResNet knows no valid region
        'model.backbone._delete_=True',
        'model.backbone.type=ResNet',
        'model.backbone.depth=18',
        'model.backbone.norm_eval=False',  # from random weights, statistics must be learned
        'model.neck.in_channels=[64,128,256,512]',
    ],
    # The distilled weights have learned with PEGs; others need a position of their own.
    'learned': ['model.backbone.position=learned', f'model.backbone.pretrain_img_size={CROP}'],
    'rope': ['model.backbone.position=rope'],
    'rope+peg': ['model.backbone.position=rope+peg'],
}


def train(arm: str, seed: int, folder: Path, options: list[str]) -> dict:
    """Train a detector, unless the folder has it, and measure it; `options` are more changes.

    Raises:
        UserError: the training failed.
    """
    run = folder / f'{arm}-{seed}'
    result = run / 'measures.json'
    if result.is_file():
        return json.loads(result.read_text())
    command = [sys.executable, '-m', 'cpvt_pyramid', 'train', str(CONFIG), '--work-dir', str(run)]
    command += ['--resume', '--no-pictures', '--cfg-options', f'randomness.seed={seed}']
    command += [*ARMS[arm], *options]
    run.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, 'OMP_NUM_THREADS': '1'}
    with open(run / 'output.txt', 'a') as output:
        done = subprocess.run(command, stdout=output, stderr=output, env=environment)
    if done.returncode:
        raise UserError(f'a training failed; {run}/output.txt says why')
    found = dict(arm=arm, seed=seed, options=options, **measure(run))
    write_text(result, json.dumps(found, indent=1))
    return found


def runs_of(arm: str, folder: Path) -> list[Path]:
    """The folders of an arm's finished trainings.

    Raises:
        UserError: there are none.
    """
    finished = sorted(folder.glob(f'{arm}-*/measures.json'))
    if not finished:
        raise UserError(
            f'no finished training in {folder}; run: python -m experiments.trees --arms {arm}'
        )
    return [path.parent for path in finished]


def files_of(run: Path) -> tuple[Path, str]:
    """The config of a finished training, and its last checkpoint."""
    [config] = run.glob('*_nano.py')
    return config, (run / 'last_checkpoint').read_text().strip()


def load_truth(root: Path, split: str):
    """The COCO annotations of a split, without the lines that pycocotools prints."""
    from pycocotools.coco import COCO

    with contextlib.redirect_stdout(io.StringIO()):
        return COCO(root / f'annotations/instances_{split}.json')


def measure(run: Path) -> dict[str, float]:
    """AP, AP50, recall and precision on each photograph with boxes, at its own size."""
    import torch
    from mmdet.apis import inference_detector, init_detector
    from mmengine.config import Config

    torch.set_num_threads(1)
    config, checkpoint = files_of(run)
    cfg = Config.fromfile(str(config))
    model = init_detector(cfg, checkpoint, device='cpu')
    found: dict[str, float] = {}
    root = Path(cfg.data_root)
    for name, (split, file) in PHOTOGRAPHS.items():
        truth = load_truth(root, split)
        [image] = [i for i in truth.dataset['images'] if i['file_name'] == file]
        instances = inference_detector(model, str(root / split / file)).pred_instances
        boxes, scores = instances.bboxes, instances.scores
        objects = torch.tensor([a['bbox'] for a in truth.imgToAnns[image['id']]])
        objects[:, 2:] += objects[:, :2]
        values = precision(truth, {image['id']: (boxes, scores)})
        values |= at_score(boxes, scores, objects)
        found |= {f'{name} {measure}': value for measure, value in values.items()}
    return found


def precision(truth, found: Mapping[int, tuple]) -> dict[str, float]:
    """AP and AP50 as in COCO, with up to 1000 detections in an image, from the boxes (N, 4) and
    scores (N,) that were found in images of these ids."""
    from pycocotools.cocoeval import COCOeval

    detections = [
        dict(image_id=image_id, category_id=1, bbox=[x1, y1, x2 - x1, y2 - y1], score=score)
        for image_id, (boxes, scores) in found.items()
        for (x1, y1, x2, y2), score in zip(boxes.tolist(), scores.tolist())
    ]
    if not detections:
        return dict(AP=0.0, AP50=0.0)
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation = COCOeval(truth, truth.loadRes(detections), 'bbox')
        evaluation.params.imgIds = list(found)
        evaluation.params.maxDets = [1000]
        evaluation.evaluate()
        evaluation.accumulate()
    table = evaluation.eval['precision'][:, :, 0, 0, 0]  # IoU, recall
    return dict(AP=float(table.mean()), AP50=float(table[0].mean()))


def at_score(boxes, scores, objects) -> dict[str, float]:
    """Recall and precision of the detections above the score, each matched to one object."""
    from scipy.optimize import linear_sum_assignment
    from torchvision.ops import box_iou

    kept = boxes[scores > SCORE]
    overlaps = box_iou(kept, objects).numpy()
    rows, columns = linear_sum_assignment(overlaps, maximize=True)
    matched = int((overlaps[rows, columns] >= MATCH_IOU).sum())
    return {
        'recall': matched / len(objects),
        'precision': matched / len(kept) if len(kept) else 0.0,
    }
