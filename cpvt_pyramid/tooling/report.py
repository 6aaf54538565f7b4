"""Tables and names of metrics, as several tools print and draw them."""

from collections.abc import Iterable, Sequence

# The metrics worth showing, of all that evaluators report, and their names in print.
HEADLINES = {
    'bbox_mAP': 'box AP',
    'bbox_mAP_50': 'box AP50',
    'bbox_mAP_s': 'box AP small',
    'segm_mAP': 'mask AP',
    'segm_mAP_50': 'mask AP50',
    'mIoU': 'mIoU',
    'mAcc': 'mAcc',
    'aAcc': 'aAcc',
}


def headlines(metrics: Iterable[str]) -> dict[str, str]:
    """The metrics to show and their names in print; all of them if none is known.

    Args:
        metrics: as evaluators name them, with or without a prefix such as `coco/`.
    """
    metrics = list(metrics)
    known = {
        metric: name
        for short, name in HEADLINES.items()
        for metric in metrics
        if metric.rpartition('/')[2] == short
    }
    return known or {metric: metric for metric in metrics}


def text_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table for a terminal: the first column is left-justified, the others right-justified."""
    lines = [head, *rows]
    first, *others = (max(map(len, column)) for column in zip(*lines))
    return '\n'.join(
        '  '.join([name.ljust(first), *map(str.rjust, cells, others)]).rstrip()
        for name, *cells in lines
    )


def markdown_table(
    head: Sequence[object], rows: Iterable[Sequence[object]], numbers: bool = False
) -> str:
    """A table in Markdown; `numbers` right-justifies all columns but the first."""
    rule = ['---', *('---:' if numbers else '---' for _ in head[1:])]
    return ''.join(f'| {" | ".join(map(str, cells))} |\n' for cells in (head, rule, *rows))
