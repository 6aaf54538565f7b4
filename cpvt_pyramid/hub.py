"""Models on the Hugging Face hub: backbones, classifiers, and whole detectors and segmentors.

    model = HubModel('retinanet', backbone='pcpvt_small', num_classes=10)
    losses = model(images, targets)                    # as in torchvision_models.retinanet
    model.push_to_hub('me/digits', model_card_kwargs=dict(license='apache-2.0'))
    model = HubModel.from_pretrained('me/digits')      # or a folder of model.save_pretrained(...)

A repository holds `config.json`, which says what to build with which options, `model.safetensors`
and `README.md`, the model card. Loading it runs no code from it: `config.json` can only name the
models in `KINDS`, and weights are only read from safetensors.
"""

import json
import re
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Optional, Union

from huggingface_hub import (
    EvalResult,
    HfApi,
    ModelCard,
    ModelCardData,
    PyTorchModelHubMixin,
    hf_hub_download,
)
from safetensors.torch import save_file
from torch import nn

from .checkpoints import read_checkpoint
from .checkpoints.fit import compare
from .checkpoints.reading import listed

# The module that defines each model, and the model's task on the hub.
KINDS = {
    'CPVTPyramid': ('pyramid', 'image-feature-extraction'),
    'DenseCPVT': ('columnar', 'image-feature-extraction'),
    'CPVT': ('columnar', 'image-classification'),
    'classifier': ('timm_models', 'image-classification'),
    'retinanet': ('torchvision_models', 'object-detection'),
    'fcos': ('torchvision_models', 'object-detection'),
    'faster_rcnn': ('torchvision_models', 'object-detection'),
    'mask_rcnn': ('torchvision_models', 'object-detection'),
    'semantic_fpn': ('torchvision_models', 'image-segmentation'),
}
CONFIG = 'config.json'
WEIGHTS = 'model.safetensors'
# Options of `from_pretrained`, and of `push_to_hub`.
DOWNLOADING = ('revision', 'token', 'cache_dir', 'local_files_only', 'force_download')
PUSHING = (
    'commit_message',
    'private',
    'token',
    'branch',
    'create_pr',
    'allow_patterns',
    'ignore_patterns',
    'delete_patterns',
    'model_card_kwargs',
)


class HubModel(nn.Module, PyTorchModelHubMixin, library_name='cpvt_pyramid'):
    """A model of this package that can be saved to and loaded from a folder or the hub.

    `push_to_hub`, `save_pretrained` and their arguments are those of huggingface_hub's
    `PyTorchModelHubMixin`. Their `model_card_kwargs` are the arguments of `generate_model_card`.

    Args:
        kind: a class of backbones or classifiers ('CPVTPyramid', 'DenseCPVT', 'CPVT'), a function
            of `torchvision_models` ('retinanet', ...), or 'classifier', a model of timm's
            registry by its `model_name`.
        classes: name of each label, if it is to be stored.
        **options: of the model, in values that JSON has. A backbone within a detector is given by
            its name or as a dict of its options.

    Attributes:
        model: the model itself. Calling the `HubModel` calls it.

    Examples:
        >>> model = HubModel('CPVTPyramid', arch='pcpvt_nano')
        >>> model.save_pretrained('nano')
        >>> HubModel.from_pretrained('nano').model.channels
        (32, 64, 128, 192)
    """

    def __init__(
        self, kind: str, *, classes: Optional[Sequence[str]] = None, **options: Any
    ) -> None:
        super().__init__()
        if not isinstance(kind, str) or kind not in KINDS:
            raise ValueError(f'kind must be one of {", ".join(KINDS)}, got {kind!r}')
        if isinstance(classes, str):
            raise ValueError(f'classes must be a list of names, got {classes!r}')
        labels = options.get('num_classes')
        if classes and labels is not None and len(classes) != labels:
            raise ValueError(f'classes must name num_classes={labels} labels, got {len(classes)}')
        # As they are loaded again: tuples become lists.
        self.options = json.loads(json.dumps(options))
        self.classes = None if classes is None else list(classes)
        self.kind = kind
        module = import_module(f'.{KINDS[kind][0]}', __package__)
        self.model = getattr(module, kind)(**self.options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Union[str, Path], **options: Any
    ) -> 'HubModel':
        """Load a model, in evaluation mode.

        Args:
            pretrained_model_name_or_path: a repository on the hub, or a folder.
            **options: of `huggingface_hub.hf_hub_download`: `revision`, `token`, `cache_dir`,
                `local_files_only`, `force_download`.

        Raises:
            FileNotFoundError: the folder lacks a file.
            ValueError: there is no such folder, or a file is damaged or not of a model of this
                package; a revision of a folder.
            TypeError: another option, such as one of the model. Those are in `config.json`.
        """
        source = str(pretrained_model_name_or_path)
        advice = f'; options of the model are those in its {CONFIG}'
        check_option_names('from_pretrained', options, DOWNLOADING, advice)
        is_folder = Path(source).is_dir()
        if is_folder and options.get('revision') is not None:
            raise ValueError(f'{source} is a folder, which has no revision')

        def path_of(name: str) -> Path:
            if is_folder:
                return Path(source, name)
            return Path(hf_hub_download(source, name, **options))

        path = path_of(CONFIG)
        try:
            config = json.loads(path.read_text(encoding='utf-8'))
            kind = config['kind']
            model_options = dict(config['options'])
            unused = config.keys() - {'kind', 'options', 'classes'}
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(
                f"{path} must hold the 'kind' and the 'options' of a HubModel. Load a model that "
                f'timm saved with timm.create_model, and backbones of others with load_weights'
            ) from None
        if unused and kind != 'classifier':  # timm has keys of its own
            warnings.warn(f'{path}: nothing reads {listed(sorted(unused))}', stacklevel=2)
        try:
            model = cls(kind, classes=config.get('classes'), **model_options)
        except ImportError:
            raise
        except Exception as error:  # whatever a damaged option leads to
            raise ValueError(f'{path}: {error}') from error
        path = path_of(WEIGHTS)
        weights = read_checkpoint(path)
        misfit = compare(model.model.state_dict(), weights).misfit
        if misfit:
            raise ValueError(f'{path} does not fit {CONFIG}: it {misfit}')
        model.model.load_state_dict(weights)
        return model.eval()

    def save_pretrained(
        self,
        save_directory: Union[str, Path],
        *,
        config: object = None,
        push_to_hub: bool = False,
        **options: Any,
    ) -> Optional[str]:
        """Write the files of a repository to a folder. See the mixin.

        Args:
            save_directory: the folder.
            config: not used; the mixin's methods pass it to each other.
            push_to_hub: also upload the files.
            **options: `model_card_kwargs` and, with `push_to_hub`, `repo_id` and the options of the
                method of that name.

        Raises:
            TypeError: another option.
        """
        known = ('repo_id', *PUSHING) if push_to_hub else ('push_to_hub', 'model_card_kwargs')
        check_option_names('save_pretrained', options, known)
        return super().save_pretrained(save_directory, push_to_hub=push_to_hub, **options)

    def _save_pretrained(self, save_directory: Path) -> None:
        config = dict(kind=self.kind, options=self.options, classes=self.classes)
        if self.kind == 'classifier':  # in timm's form, for timm.create_model('hf-hub:...')
            from timm.models._hub import save_for_hf

            config |= dict(label_names=self.classes)
            save_for_hf(self.model, str(save_directory), config, safe_serialization=True)
            return
        tensors = {name: x.contiguous() for name, x in self.model.state_dict().items()}
        save_file(tensors, save_directory / WEIGHTS, metadata={'format': 'pt'})
        (save_directory / CONFIG).write_text(json.dumps(config, indent=2), encoding='utf-8')

    def push_to_hub(
        self,
        repo_id: str,
        *,
        config: object = None,
        model_card_kwargs: Optional[dict] = None,
        **options: Any,
    ) -> str:
        """Create the repository if there is none, and upload the model. See the mixin.

        Args:
            repo_id: 'OWNER/NAME', or a name.
            config: not used; the mixin's methods pass it to each other.
            model_card_kwargs: see `generate_model_card`.
            **options: `commit_message`, `private`, `token` and so on, of the mixin.

        Raises:
            TypeError: another option.
        """
        check_option_names('push_to_hub', options, PUSHING)
        api = HfApi(token=options.get('token'))
        # The code in the card needs the full name, with the owner.
        repo_id = api.create_repo(repo_id, private=options.get('private'), exist_ok=True).repo_id
        card = dict(repo_id=repo_id) | (model_card_kwargs or {})
        return super().push_to_hub(repo_id, model_card_kwargs=card, **options)

    def generate_model_card(
        self,
        *,
        repo_id: str = '.',
        license: Optional[str] = None,
        data: Optional[str] = None,
        metrics: Optional[dict[str, float]] = None,
    ) -> ModelCard:
        """The model card, README.md.

        Args:
            repo_id: what its code loads the model from.
            license: of the weights, by its identifier on the hub, such as 'apache-2.0'.
            data: what the model was trained and evaluated on.
            metrics: by their names.
        """
        _, task = KINDS[self.kind]
        name = repo_id.rpartition('/')[2].strip('.') or self.kind
        dataset = data or 'unknown'
        results = []
        for metric, value in (metrics or {}).items():
            result = EvalResult(
                task_type=task,
                dataset_type=re.sub(r'\W+', '-', dataset).strip('-').lower(),
                dataset_name=dataset,
                metric_type=metric,
                metric_value=value,
            )
            results.append(result)
        arguments = [repr(self.kind)]
        arguments += [f'{option}={value!r}' for option, value in self.options.items()]
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return ModelCard.from_template(
            ModelCardData(
                library_name='cpvt_pyramid',
                license=license,
                pipeline_tag=task,
                tags=['cpvt', 'vision-transformer'],
                model_name=name,
                eval_results=results or None,
            ),
            template_str=CARD,
            name=name,
            source=repo_id,
            arguments=', '.join(arguments),
            parameters=f'{parameters / 1e6:.1f}M',
            extra='timm' if self.kind == 'classifier' else 'torchvision',
            normalized=task != 'object-detection',
            predict=PREDICT[task],
            classes=', '.join(self.classes or ()),
            data=data,
            metrics=metrics or {},
            license=license,
        )


def check_option_names(
    method: str, options: dict[str, Any], known: Sequence[str], advice: str = ''
) -> None:
    """Raise a TypeError if a method does not know an option."""
    unknown = sorted(options.keys() - set(known))
    if unknown:
        raise TypeError(
            f'{method} has no option {listed(unknown)}, only {", ".join(known)}{advice}'
        )


PREDICT = {
    'image-feature-extraction': 'maps = model(image[None])',
    'image-classification': 'scores = model(resize(image, [224, 224])[None]).softmax(1)[0]',
    'object-detection': '(found,) = model([image])  # boxes (x1, y1, x2, y2), scores and labels',
    'image-segmentation': "labels = model(image[None])['out'].argmax(1)[0]  # (H, W)",
}
CARD = """---
{{ card_data }}
---

# {{ name }}

`HubModel({{ arguments }})` of cpvt_pyramid ([CPVT](https://arxiv.org/abs/2102.10882)),
{{ parameters }} parameters. It takes images of any size.

In a checkout of cpvt_pyramid:

```bash
pip install '.[hub,{{ extra }}]'
```

```python
import torch
from PIL import Image
from torchvision.transforms.functional import normalize, resize, to_tensor

from cpvt_pyramid.hub import HubModel

model = HubModel.from_pretrained('{{ source }}')
image = to_tensor(Image.open('image.jpg').convert('RGB'))  # (3, H, W)
{% if normalized %}image = normalize(image, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
{% endif %}with torch.no_grad():
    {{ predict }}
```

| | |
|---|---|
| classes | {{ classes or 'Not stated' }} |
| training data | {{ data or 'Not stated' }} |
| licence | {{ license or 'Not stated' }} |
{% for metric, value in metrics.items() %}| {{ metric }} | {{ value }} |
{% endfor %}"""
