"""Bytes that were a file once: cut, overwritten, doubled, swapped."""

from collections.abc import Callable

from hypothesis import strategies as st


@st.composite
def damaged(draw: Callable, whole: bytes) -> bytes:
    """`whole` after one to four accidents, most of them near its beginning or end, where formats
    keep what describes the rest."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        size = len(content)
        near = st.integers(0, min(size, 2000))
        at = draw(st.one_of(near, near.map(lambda n, size=size: size - n), st.integers(0, size)))
        accident = draw(
            st.sampled_from(['cut', 'cut the start', 'flip', 'zero', 'insert', 'double'])
        )
        if accident == 'cut':
            del content[at:]
        elif accident == 'cut the start':
            del content[:at]
        elif accident == 'flip' and at < size:
            content[at] ^= 1 << draw(st.integers(0, 7))
        elif accident == 'zero':
            length = min(draw(st.sampled_from([1, 4, 64, 4096])), size - at)
            content[at : at + length] = bytes(length)
        elif accident == 'insert':
            content[at:at] = draw(st.binary(max_size=40))
        elif accident == 'double':
            content[at:at] = content[at : at + 4096]
    return bytes(content)
