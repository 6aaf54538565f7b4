"""What models predict for an image: detections, label maps, and panoptic segments."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Optional, Union

import numpy as np
from PIL import Image

from ..tooling.command import UserError
from ..tooling.files import atomic_write
from .drawing import Color, draw_boxes, draw_segmentation
from .records import bounding_box, coco_fields, run_lengths, write_records

if TYPE_CHECKING:
    import supervision

Kind = Literal['detections', 'segments', 'labels']  # as in the names of the files of a run


@dataclass(frozen=True)
class _Prediction:
    """What the kinds of predictions share."""

    image: np.ndarray
    classes: Sequence[str]
    palette: Sequence[Color]

    kind: ClassVar[Kind]

    def draw(self, legend: bool = True) -> Image.Image:
        raise NotImplementedError

    def items(self) -> list[dict[str, Any]]:
        """What was found: dicts with `label`, `class`, and some of `box`, `score` and `mask`, in
        COCO's run-length encoding."""
        raise NotImplementedError

    def to_coco(
        self, image_id: int = 0, category_ids: Optional[Sequence[int]] = None
    ) -> list[dict[str, Any]]:
        """As COCO results, which pycocotools' `loadRes` reads; a label map as those of the stuff
        segmentation, one for each class in the image.

        Args:
            image_id: of the image in the data set.
            category_ids: of each class; by default 1, 2, 3, ...
        """
        ids = category_ids or range(1, len(self.classes) + 1)
        results = []
        for item in self.items():
            result = {'image_id': image_id, 'category_id': ids[item['label']]}
            results.append(result | coco_fields(item))
        return results

    def write(self, folder: Path, name: str, source: Union[str, Path]) -> None:
        """Write NAME.overlay.png, and NAME.detections.json, NAME.labels.png, or NAME.segments.json
        and .png.

        Args:
            folder: an existing folder.
            name: begins the file names.
            source: the image's path, for the JSON file.
        """
        save_picture(self.draw(), folder / f'{name}.overlay.png')
        self._write(folder / f'{name}.{self.kind}', source)

    def _write(self, stem: Path, source: Union[str, Path]) -> None:
        path = stem.with_name(f'{stem.name}.json')
        write_records(path, source, self.image.shape[:2], self.kind, self.records())

    def records(self) -> list[dict[str, Any]]:
        """What JSON files hold: the items with rounded numbers."""
        return [
            item | {'box': [round(v, 2) for v in item['box']], 'score': round(item['score'], 4)}
            for item in self.items()
        ]

    def name_of(self, label: int) -> str:
        return self.classes[label] if label < len(self.classes) else str(label)


@dataclass(frozen=True)
class Detections(_Prediction):
    """Objects in an image, best first, in pixels of the image.

    Args:
        image: (H, W, 3) RGB uint8.
        classes: names.
        palette: a colour per class, RGB from 0 to 255.
        boxes: (N, 4) float32, x1, y1, x2, y2.
        scores: (N,) float32, 0 to 1.
        labels: (N,), indices into `classes`.
        masks: (N, H, W) boolean, or None if the model has none.
    """

    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray
    masks: Optional[np.ndarray] = None

    kind: ClassVar[Kind] = 'detections'

    def __len__(self) -> int:
        return len(self.boxes)

    def above(self, score: float) -> 'Detections':
        """Those with at least this score."""
        keep = self.scores >= score
        return replace(
            self,
            boxes=self.boxes[keep],
            scores=self.scores[keep],
            labels=self.labels[keep],
            masks=None if self.masks is None else self.masks[keep],
        )

    def draw(self, legend: bool = True) -> Image.Image:
        """The image with boxes, masks, names and scores; small images are enlarged."""
        return draw_boxes(
            self.image, self.boxes, self.labels, self.scores, self.classes, self.palette,
            masks=self.masks,
        )  # fmt: skip

    def items(self) -> list[dict[str, Any]]:
        """The objects, as dicts."""
        items = [
            {'box': box, 'label': label, 'class': self.name_of(label), 'score': score}
            for box, label, score in zip(
                self.boxes.tolist(), self.labels.tolist(), self.scores.tolist()
            )
        ]
        for item, mask in zip(items, () if self.masks is None else self.masks):
            item['mask'] = run_lengths(mask)
        return items

    def to_supervision(self) -> 'supervision.Detections':
        """As `supervision.Detections`, with class names under `data['class_name']`."""
        return _to_supervision(
            self, self.labels, xyxy=self.boxes, mask=self.masks, confidence=self.scores
        )


@dataclass(frozen=True)
class LabelMap(_Prediction):
    """The class of each pixel of an image.

    Args:
        image: (H, W, 3) RGB uint8.
        classes: names.
        palette: a colour per class, RGB from 0 to 255.
        labels: (H, W), indices into `classes`.
    """

    labels: np.ndarray

    kind: ClassVar[Kind] = 'labels'

    def draw(self, legend: bool = True) -> Image.Image:
        """The image with its segments tinted, above a legend; small images are enlarged."""
        return draw_segmentation(self.image, self.labels, self.classes, self.palette, legend)

    def items(self) -> list[dict[str, Any]]:
        """The classes in the image, as dicts."""
        return [
            {
                'label': label,
                'class': self.name_of(label),
                'mask': run_lengths(self.labels == label),
            }
            for label in np.unique(self.labels).tolist()
        ]

    def to_supervision(self) -> 'supervision.Detections':
        """As `supervision.Detections` with one mask for each class in the image."""
        present = np.unique(self.labels).astype(int)
        masks = self.labels == present[:, None, None]
        boxes = np.array([bounding_box(mask) for mask in masks], np.float32)
        return _to_supervision(self, present, xyxy=boxes, mask=masks)

    def _write(self, stem: Path, source: Union[str, Path]) -> None:
        """A picture whose pixel values are class indices. Viewers show it in the colours of the
        classes, or in grey if there are more than 256."""
        if len(self.classes) > 256:
            picture = Image.fromarray(self.labels.astype(np.uint16))
        else:
            picture = Image.fromarray(self.labels.astype(np.uint8)).convert('P')
            picture.putpalette([int(v) for color in self.palette for v in color])
        save_picture(picture, stem.with_name(f'{stem.name}.png'))


@dataclass(frozen=True)
class Segments(_Prediction):
    """The panoptic segments of an image.

    Args:
        image: (H, W, 3) RGB uint8.
        classes: names.
        palette: a colour per class, RGB from 0 to 255.
        numbers: (H, W), from 1 on; 0 where there is no segment.
        labels: (N,), indices into `classes`, of segments 1 to N.
    """

    numbers: np.ndarray
    labels: np.ndarray

    kind: ClassVar[Kind] = 'segments'

    def draw(self, legend: bool = True) -> Image.Image:
        """The image with its segments tinted, above a legend; small images are enlarged."""
        labels = np.array([len(self.classes), *self.labels])[self.numbers]
        return draw_segmentation(
            self.image, labels, self.classes, self.palette, legend, segments=self.numbers
        )

    def items(self) -> list[dict[str, Any]]:
        """The segments, as dicts with an `id`."""
        items = []
        for number, label in enumerate(self.labels.tolist(), 1):
            mask = self.numbers == number
            item = {'id': number, 'label': label, 'class': self.name_of(label)}
            items.append(item | {'area': int(mask.sum()), 'box': bounding_box(mask)})
        return items

    records = items

    def _write(self, stem: Path, source: Union[str, Path]) -> None:
        save_picture(
            Image.fromarray(self.numbers.astype(np.uint16)), stem.with_name(f'{stem.name}.png')
        )
        super()._write(stem, source)


Prediction = Union[Detections, LabelMap, Segments]


def save_picture(picture: Image.Image, path: Path) -> None:
    with atomic_write(path) as file:
        picture.save(file, 'PNG')


def _to_supervision(
    found: _Prediction, labels: np.ndarray, **fields: Any
) -> 'supervision.Detections':
    try:
        import supervision
    except ImportError as error:
        raise UserError(
            f'to_supervision needs supervision; pip install supervision ({error})'
        ) from error
    names = np.array([found.classes[label] for label in labels], str)
    return supervision.Detections(class_id=labels, data={'class_name': names}, **fields)
