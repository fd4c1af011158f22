"""gdntune/files.py: whole files, and what stands where one is to go."""

import os
import stat
import threading

import pytest

from gdntune import files


def test_a_links_target_is_replaced(tmp_path):
    """Fault: a symbolic link was replaced by a file, and what it named stayed as it was."""
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    files.write_whole(tmp_path / "link.json", b"new")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_bytes() == b"new"
    (tmp_path / "dangling").symlink_to(tmp_path / "later")
    files.write_whole(tmp_path / "dangling", b"made")
    assert (tmp_path / "later").read_bytes() == b"made" and (tmp_path / "dangling").is_symlink()


def test_modes_are_kept(tmp_path):
    """Fault: what was replaced became readable for all, and a new file was so whatever the umask."""
    kept, new = tmp_path / "kept.json", tmp_path / ("n" * 250)
    kept.write_text("old")
    kept.chmod(0o640)
    umask = os.umask(0o077)
    try:
        for path in (kept, new):
            files.write_whole(path, b"new")
    finally:
        os.umask(umask)
    assert [stat.S_IMODE(p.stat().st_mode) for p in (kept, new)] == [0o640, 0o600]


def test_a_fifo_is_written_to(tmp_path):
    """Fault: a FIFO was replaced by a file, and its reader waited for ever."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    got = []
    reader = threading.Thread(target=lambda: got.append(fifo.read_bytes()))
    reader.start()
    files.write_whole(fifo, b"through")
    reader.join(60)
    assert got == [b"through"] and stat.S_ISFIFO(fifo.stat().st_mode)


def test_a_device_is_written_to(tmp_path):
    """Fault: a character device was replaced by a file, /dev/null among them."""
    (tmp_path / "null").symlink_to("/dev/null")
    for path in ("/dev/null", tmp_path / "null"):
        files.write_whole(path, b"gone")
        assert stat.S_ISCHR(os.stat(path).st_mode)
    with pytest.raises(OSError, match="No space left") as e:
        files.write_whole("/dev/full", b"x")
    assert e.value.filename == "/dev/full"


def test_a_folder_is_refused(tmp_path):
    """A folder is no place for a file, and nothing is left beside it."""
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        files.write_whole(tmp_path / "folder", b"x")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
