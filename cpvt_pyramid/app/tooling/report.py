"""Numbers and tables as several tools print them."""

from collections.abc import Iterable, Sequence


def amount(number: int, name: str, plural: str = '') -> str:
    """A number of things, such as `1 epoch` or `2 classes`; the plural ends with s by default."""
    return f'{number} {name}' if number == 1 else f'{number} {plural or name + "s"}'


def duration(seconds: float) -> str:
    """A time for people, such as `40 seconds`, `25 minutes` or `3.5 hours`."""
    if seconds < 100:
        return amount(round(seconds), 'second')
    if seconds < 6000:
        return amount(round(seconds / 60), 'minute')
    if seconds < 360_000:
        return f'{seconds / 3600:.1f} hours'
    return f'{seconds / 86_400:.1f} days'


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
