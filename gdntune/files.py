"""Files that are written whole or not at all."""

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file whole or not at all: what stood there stands until all of it is on the disk.

    Folders are made. Of a symbolic link the target is replaced, so that the link stays; what is
    replaced gives its mode. A character device or a FIFO (/dev/stdout, a shell's `>(...)`) is
    written to: to put a file in its place would destroy it. Raises OSError, with the path as its
    filename.
    """
    path = Path(path)
    try:
        if _is_stream(path):
            with path.open("wb", buffering=0) as stream:
                stream.write(data)
            return
        # The link's target, or the link would turn into a file.
        _replace(Path(os.path.realpath(path)), data)
    except OSError as e:
        # Not the temporary file's name, which nobody chose.
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
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    # Not mkstemp, whose files are for their owner alone, whatever the user's umask. In the same
    # folder: a rename across file systems is a copy.
    temporary = path.parent / f".gdntune-{os.getpid()}-{secrets.token_hex(4)}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            # Before the rename: after a crash some file systems have the new name and none of its
            # bytes.
            os.fsync(descriptor)
        if mode is not None:
            os.chmod(temporary, mode)
        os.replace(temporary, path)
    # Ctrl-C too: no temporary file is left behind.
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
