"""What takes the predictions for files, one after the other, from the loop in `running`."""

# Commands derive from `Sink` before they import anything slow.
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..tooling.files import distinct_name, shortened

if TYPE_CHECKING:
    from ..images.inputs import NamedInput
    from ..predictions.kinds import Prediction
    from .contents import Contents
    from .videos import Video


class Frame(NamedTuple):
    """A frame of a video."""

    number: int
    tick: int  # when it is shown, in the unit of the video
    seconds: float  # after the first frame
    found: Prediction


class Sink:
    """Takes what a model finds in files. A command that does something new with predictions derives
    from it, defines `write`, and calls `running.run_on_files`.

    The methods that write are called by several threads at the same time, in any order.
    """

    takes_videos = False
    # Whether images that are divided by --tile come to `write_large`, and need not fit into memory;
    # else they come to `write`, as others do.
    takes_large = False

    def name(self, inputs: Mapping[Path, str]) -> list[NamedInput]:
        """Name what is written about inputs. No two names are equal, also where case does not
        count.

        Args:
            inputs: each with the name that it should have; see `find_inputs`.
        """
        taken: set[str] = set()
        return [(path, distinct_name(shortened(name), taken)) for path, name in inputs.items()]

    def write(self, entry: NamedInput, found: Prediction) -> None:
        """Take what was found in an image."""
        raise NotImplementedError

    def write_large(self, entry: NamedInput, contents: Contents) -> None:
        """Take what was found in an image that need not fit into memory."""
        raise NotImplementedError

    def write_video(self, entry: NamedInput, video: Video, frames: Iterator[Frame]) -> None:
        """Take what was found in a video, each frame when it is asked for. An error of the video
        may come with any of them, and after the last."""
        raise NotImplementedError

    def finish(self, done: Sequence[NamedInput]) -> None:
        """Called at the end, with the inputs that were not skipped, in their order."""
