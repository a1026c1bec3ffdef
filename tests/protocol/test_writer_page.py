"""Promises of writer_page.py: the words of both sides lie within the page, each side's in cache lines of its own."""

from kvstore.protocol import writer_page

LINE_BYTES = 64


def test_the_two_sides_share_no_cache_line() -> None:
    by_node = {writer_page.AT_NUMBER, writer_page.AT_SLAB, writer_page.AT_OFFSET, writer_page.AT_SIZE}
    by_node.update(range(writer_page.AT_SLABS_AHEAD, writer_page.AT_SLABS_AHEAD + writer_page.SLABS_AHEAD))
    assert len(by_node) == 4 + writer_page.SLABS_AHEAD
    assert writer_page.AT_PAGE_MAGIC not in by_node
    lines = {8 * at // LINE_BYTES for at in by_node}
    assert 8 * writer_page.AT_WRITING // LINE_BYTES not in lines
    assert 8 * max(*by_node, writer_page.AT_WRITING) < writer_page.PAGE_BYTES
