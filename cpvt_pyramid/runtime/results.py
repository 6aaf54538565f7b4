"""Predictions for an image: detections and label maps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import numpy as np
from PIL import Image

from ..tooling.command import UserError
from ..tooling.drawing import Color, draw_boxes, draw_segmentation
from ..tooling.files import atomic_write
from ..tooling.records import (
    detection_records,
    head_of_image,
    label_picture,
    run_lengths,
    write_list,
)

if TYPE_CHECKING:
    import supervision


@dataclass(frozen=True)
class Detections:
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

    image: np.ndarray
    classes: Sequence[str]
    palette: Sequence[Color]
    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray
    masks: Optional[np.ndarray] = None

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

    def draw(self) -> Image.Image:
        """The image with boxes, masks, names and scores; small images are enlarged."""
        return draw_boxes(
            self.image, self.boxes, self.labels, self.scores, self.classes, self.palette,
            masks=self.masks,
        )  # fmt: skip

    def to_supervision(self) -> 'supervision.Detections':
        """As `supervision.Detections`, with class names under `data['class_name']`."""
        return _supervision().Detections(
            xyxy=self.boxes,
            mask=self.masks,
            confidence=self.scores,
            class_id=self.labels,
            data={'class_name': np.array([self.classes[label] for label in self.labels], str)},
        )

    def to_coco(
        self, image_id: int = 0, category_ids: Optional[Sequence[int]] = None
    ) -> list[dict[str, Any]]:
        """As COCO results, which pycocotools' `loadRes` reads.

        Args:
            image_id: of the image in the data set.
            category_ids: of each class; by default 1, 2, 3, ...
        """
        ids = category_ids or range(1, len(self.classes) + 1)
        results = []
        for i, (x1, y1, x2, y2) in enumerate(self.boxes.tolist()):
            result = {
                'image_id': image_id,
                'category_id': ids[self.labels[i]],
                'bbox': [x1, y1, x2 - x1, y2 - y1],
                'score': float(self.scores[i]),
            }
            if self.masks is not None:
                result['segmentation'] = run_lengths(self.masks[i])
            results.append(result)
        return results

    def write(self, folder: Path, name: str, source: str) -> None:
        """Write NAME.overlay.png and NAME.detections.json.

        Args:
            folder: an existing folder.
            name: begins the file names.
            source: the image's path, for the JSON file.
        """
        save_picture(self.draw(), folder / f'{name}.overlay.png')
        items = detection_records(self.boxes, self.scores, self.labels, self.classes, self.masks)
        head = head_of_image(source, self.image.shape[:2])
        write_list(folder / f'{name}.detections.json', head, 'detections', items)


@dataclass(frozen=True)
class LabelMap:
    """The class of each pixel of an image.

    Args:
        image: (H, W, 3) RGB uint8.
        classes: names.
        palette: a colour per class, RGB from 0 to 255.
        labels: (H, W), indices into `classes`.
    """

    image: np.ndarray
    classes: Sequence[str]
    palette: Sequence[Color]
    labels: np.ndarray

    def draw(self) -> Image.Image:
        """The image with its segments tinted, above a legend; small images are enlarged."""
        return draw_segmentation(self.image, self.labels, self.classes, self.palette)

    def to_supervision(self) -> 'supervision.Detections':
        """As `supervision.Detections` with one mask for each class in the image."""
        present = np.unique(self.labels)
        masks = self.labels == present[:, None, None]
        return _supervision().Detections(
            xyxy=np.array([bounding_box(mask) for mask in masks], np.float32),
            mask=masks,
            class_id=present.astype(int),
            data={'class_name': np.array([self.classes[label] for label in present], str)},
        )

    def to_coco(
        self, image_id: int = 0, category_ids: Optional[Sequence[int]] = None
    ) -> list[dict[str, Any]]:
        """As results of COCO's stuff segmentation, one for each class in the image.

        Args:
            image_id: of the image in the data set.
            category_ids: of each class; by default 1, 2, 3, ...
        """
        ids = category_ids or range(1, len(self.classes) + 1)
        return [
            {
                'image_id': image_id,
                'category_id': ids[label],
                'segmentation': run_lengths(self.labels == label),
            }
            for label in np.unique(self.labels)
        ]

    def write(self, folder: Path, name: str, source: str) -> None:
        """Write NAME.overlay.png and NAME.labels.png; see `Detections.write`."""
        save_picture(self.draw(), folder / f'{name}.overlay.png')
        picture = label_picture(self.labels, self.classes, self.palette)
        save_picture(picture, folder / f'{name}.labels.png')


def save_picture(picture: Image.Image, path: Path) -> None:
    with atomic_write(path) as file:
        picture.save(file, 'PNG')


def bounding_box(mask: np.ndarray) -> list[int]:
    """x1, y1, x2, y2 of the pixels of a mask (H, W), which must not be empty."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]


def _supervision() -> Any:
    try:
        import supervision
    except ImportError as error:
        raise UserError(
            f'to_supervision needs supervision; pip install supervision ({error})'
        ) from error
    return supervision
