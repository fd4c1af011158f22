"""Files that are written whole or not at all."""

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file whole or not at all: what stood there stands until all of it is on the disk.

    Folders are made. Of a symbolic link the target is replaced, so that the link stays. A character
    device or a FIFO (/dev/stdout, a shell's `>(...)`) is written to: to put a file in its place
    would destroy it. Raises OSError, with the path as its filename.
    """
    path = Path(path)
    try:
        if _is_stream(path):
            with path.open("wb", buffering=0) as stream:
                stream.write(data)
            return
        _replace(Path(os.path.realpath(path)), data)
    except OSError as e:
        # not the temporary file's name, which nobody chose
        raise OSError(e.errno, e.strerror or str(e), str(path)) from e


def _is_stream(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
        raise OSError(errno.EINVAL, "a disk or a socket, where a file is expected", str(path))
    # /dev/stdout is a file where a shell redirected it, and that shell still writes to it
    return not stat.S_ISREG(mode) or path.is_relative_to("/dev")


def _replace(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.chmod(temporary, 0o644)  # mkstemp makes a file for its owner alone
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
