"""Files are written whole or not at all, and stay what they are otherwise."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from breakwater.kernel.process.files import atomic_write, write_private


def replace(path: Path, text: bytes = b"new") -> None:
    with atomic_write(path) as file:
        file.write(text)


def test_mode_and_link_stay(tmp_path: Path) -> None:
    file, link = tmp_path / "folder" / "file", tmp_path / "link"
    file.parent.mkdir()
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(Path("folder") / "file")
    replace(link)
    assert link.is_symlink()
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("new", 0o640)
    write_private(link, "secret")
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("secret", 0o600)
    assert [one.name for one in file.parent.iterdir()] == ["file"]


def test_a_new_file_has_the_mode_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        replace(tmp_path / "file")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_what_fails_in_the_middle_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    def fail() -> None:
        with atomic_write(file) as out:
            out.write(b"half")
            raise OSError("the disk is full")

    file = tmp_path / "file"
    file.write_text("old")
    with pytest.raises(OSError, match="disk"):
        fail()
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    assert file.read_text() == "old"


def test_what_is_no_regular_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """`/dev/null`, say, or a shell's `>(gzip)`."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        replace(pipe)
        assert os.read(reader, 9) == b"new"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert [one.name for one in tmp_path.iterdir()] == ["pipe"]


def test_nobody_sees_a_part_of_it(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    with atomic_write(file) as out:
        out.write(b"half")
        out.flush()
        assert file.read_text() == "old"
