"""Promises of file_signature.py."""

from pathlib import Path

from kvstore.security.file_signature import signature


def test_a_file_that_was_written_replaced_or_removed_is_another_one(tmp_path: Path) -> None:
    file, other = tmp_path / "a", tmp_path / "b"
    assert signature(str(file)) == ()
    file.write_text("one")
    written = signature(str(file))
    assert signature(str(file)) == written
    file.write_text("longer")
    longer = signature(str(file))
    other.write_text("longer")
    other.replace(file)
    assert len({(), written, longer, signature(str(file))}) == 4
    file.unlink()
    assert signature(str(file)) == ()
