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


def markdown_table(
    head: Sequence[str], lines: Sequence[Sequence[str]], numbers: bool = False
) -> str:
    """A Markdown table whose columns are aligned in the source.

    Args:
        head: the first row.
        lines: the other rows.
        numbers: right-justify the columns.
    """
    widths = [max(map(len, column)) for column in zip(head, *lines)]
    rule = ['-' * (width - 1) + ':' if numbers else '-' * width for width in widths]
    justify = str.rjust if numbers else str.ljust
    return '\n'.join(
        '| ' + ' | '.join(map(justify, cells, widths)) + ' |' for cells in (head, rule, *lines)
    )
