"""mmengine's Runner as the commands use it."""

import logging
import re
from pathlib import Path
from typing import Any, Optional, Union

from mmengine.config import Config
from mmengine.device import get_device
from mmengine.logging import MMLogger
from mmengine.runner import Runner
from torch import nn
from torch.utils.data import DataLoader

from ...acceleration.accelerate import accelerate, what_is_missing
from ..images.formats import without_ghostscript
from ..tooling.files import keep_former, write_text
from . import hooks  # noqa: F401 (it registers those of our configs, whatever these import)

# What mmengine logs at length: kept in the log file, not shown in the terminal.
FILE_ONLY = re.compile(
    r'\n-{20}|Config:\n|Hooks will be executed|Distributed training is not used|'
    r'paramwise_options -- |'
    r'Traceback |'  # of an error whose line the command prints
    r'"(FileClient|HardDiskBackend)"'
)


class CommandRunner(Runner):
    """mmengine's Runner, with a short log in the terminal; it trains as that does.

    On a CPU the model is accelerated.
    """

    def build_logger(self, *args: Any, **options: Any) -> MMLogger:
        logger = super().build_logger(*args, **options)
        for handler in logger.handlers:
            # Else a full disk, or a closed terminal, is a traceback for each line.
            handler.handleError = raise_active  # type: ignore[method-assign]
            if not isinstance(handler, logging.FileHandler):
                handler.addFilter(lambda record: not FILE_ONLY.match(record.getMessage()))
        return logger

    @staticmethod
    def build_dataloader(dataloader: Union[DataLoader, dict], **options: Any) -> DataLoader:
        without_ghostscript()  # mmcv opens masks by Pillow, in any of its formats
        loader = Runner.build_dataloader(dataloader, **options)
        if not len(loader.dataset):  # over which an InfiniteSampler would iterate forever
            raise ValueError('there are no images in the data set, or all are filtered out')
        return loader

    def dump_config(self) -> None:
        """Nothing: `write_config` writes the config of a run, and replaces none."""

    def wrap_model(self, model_wrapper_cfg: Optional[dict], model: nn.Module) -> nn.Module:
        if get_device() == 'cpu' and not what_is_missing():
            accelerate(model)  # before DDP reads the memory formats of the weights
        return super().wrap_model(model_wrapper_cfg, model)


def write_config(cfg: Config, source: Union[str, Path], folder: Path) -> None:
    """Write the config of a run to its folder, under the name of its file. Another config of this
    name is kept; the file itself, where it is in this folder, stays as it is.

    Args:
        cfg: the config, with all options.
        source: its file.
        folder: of the run.
    """
    path = folder / Path(source).name
    text = cfg.dump()
    if path.exists():
        if path.read_text(encoding='utf-8') == text:
            return
        if path.samefile(source):
            print(f'{path} stays as it is; the config with all options is in {folder}/*/vis_data')
            return
        kept = keep_former(path)
        print(f'the config of a run before is {kept} now')
    write_text(path, text)


def raise_active(record: logging.LogRecord) -> None:
    raise  # logging calls this while it handles an error
