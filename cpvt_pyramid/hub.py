"""Models on the Hugging Face hub: backbones, the columnar classifier and detectors.

    model = HubModel('retinanet', backbone='pcpvt_small', num_classes=10)
    losses = model(images, targets)                    # as in tasks.detectors.retinanet
    model.push_to_hub('me/digits')
    model = HubModel.from_pretrained('me/digits')      # or a folder of model.save_pretrained(...)

All methods are those of huggingface_hub's `PyTorchModelHubMixin`. A repository holds `config.json`,
which says what to build with which options, `model.safetensors` and `README.md`, the model card.
"""

import json
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Optional

from huggingface_hub import PyTorchModelHubMixin
from torch import nn

# The module that defines each model.
KINDS = {
    'CPVTPyramid': 'model',
    'DenseCPVT': 'columnar',
    'CPVT': 'columnar',
    'retinanet': 'tasks.detectors',
    'fcos': 'tasks.detectors',
    'faster_rcnn': 'tasks.detectors',
    'mask_rcnn': 'tasks.detectors',
}
CARD = """---
{{ card_data }}
---

# {{ repo_id | default("A model of cpvt_pyramid", true) }}

{{ description | default("Training data, metrics and licence are not stated.", true) }}

In a checkout of cpvt_pyramid: `pip install '.[torch]'`

```python
from cpvt_pyramid.hub import HubModel

model = HubModel.from_pretrained('{{ repo_id | default("OWNER/NAME", true) }}')
```
"""


def plain(value: Any) -> Any:
    """A value in what JSON has: rows of our tables, such as an `Arch`, become dicts."""
    if hasattr(value, '_asdict'):  # a NamedTuple
        value = value._asdict()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


class HubModel(
    nn.Module,
    PyTorchModelHubMixin,
    library_name='cpvt_pyramid',
    paper_url='https://arxiv.org/abs/2102.10882',
    tags=['cpvt', 'vision-transformer'],
    model_card_template=CARD,
    coders={tuple: (plain, tuple), dict: (plain, dict)},
):
    """A model of this package that can be saved to and loaded from a folder or the hub.

    The model card is made of `model_card_kwargs=dict(repo_id=..., description=...)` of
    `push_to_hub` and `save_pretrained`.

    Args:
        kind: a class ('CPVTPyramid', 'DenseCPVT', 'CPVT') or a function of `tasks.detectors`
            ('retinanet', ...).
        classes: name of each label, if it is to be stored.
        **options: options of the model, in values that JSON has, or rows such as `Arch` and
            `PEGConfig`. A backbone within a detector is given by its name or as a dict of its
            options.

    Attributes:
        model: the model itself. Calling the `HubModel` calls it.

    Examples:
        >>> model = HubModel('CPVTPyramid', arch='pcpvt_nano')
        >>> model.save_pretrained('nano')
        >>> model = HubModel.from_pretrained('nano')
        Loading weights from local directory
        >>> model.model.channels
        (32, 64, 128, 192)
    """

    def __init__(
        self, kind: str, *, classes: Optional[Sequence[str]] = None, **options: Any
    ) -> None:
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f'kind must be one of {", ".join(KINDS)}, got {kind!r}')
        module = import_module(f'.{KINDS[kind]}', __package__)
        # As they are when they are loaded again: tuples become lists, and others are an error.
        options = json.loads(json.dumps(plain(options)))
        self.model = getattr(module, kind)(**options)
        self.classes = classes

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    @classmethod
    def _from_pretrained(cls, *, strict: bool = True, **options: Any) -> 'HubModel':
        """As in the mixin, which does not mind missing tensors unless it is told to."""
        return super()._from_pretrained(strict=strict, **options)
