"""All questions, by name, in the order of the report."""

from collections.abc import Callable, Sequence

from cpvt_pyramid.lab.probes import Subject
from experiments.report import LabAnswer

from .anchoring import compare_anchoring
from .attention import measure_attention
from .border import compare_borders
from .coordinates import compare_coordinates
from .encodings import compare_encodings, compare_placements
from .laboratory import Lab
from .padding import measure_padding
from .paper import compare_with_paper
from .probe import measure_probe
from .registers import measure_registers
from .shift import measure_shift
from .sizes import compare_canvases, compare_sizes

# About encodings, which the lab trains models with.
TRAINED: dict[str, Callable[[Lab], LabAnswer]] = {
    'encodings': compare_encodings,
    'placement': compare_placements,
    'resolution': compare_sizes,
    'canvas': compare_canvases,
    'coordinates': compare_coordinates,
    'border': compare_borders,
    'anchoring': compare_anchoring,
    'paper': compare_with_paper,
}
# About given models and the side of their images in pixels; or, without any, the lab's models.
MEASURED: dict[str, Callable[[Lab, Sequence[Subject], int], LabAnswer]] = {
    'probe': measure_probe,
    'padding': measure_padding,
    'shift': measure_shift,
    'attention': measure_attention,
    'registers': measure_registers,
}
