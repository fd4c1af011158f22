"""The server of warm processes (warm.py) outlives whoever asks it."""

import os
import socket
import sys

import pytest
import warm


@pytest.mark.parametrize("sent", [b"", b'{"command": ["-c"'], ids=["nothing", "a half"])
def test_who_asks_is_killed_before_it_has_asked(sent):
    """Fault: a sweep that a test killed while it asked for its timing process took the server with
    it, and all tests behind it.
    """
    warm.run([sys.executable, "-c", ""], dict(os.environ))  # it is up
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(os.environ[warm.PLACE])
        asking.sendall(sent)
    done = warm.run([sys.executable, "-c", "print(1)"], dict(os.environ))
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
