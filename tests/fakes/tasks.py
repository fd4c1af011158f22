"""Tasks that run in processes and actors. Apart from the tests, whose imports take each new process
two to three seconds of CPU time.
"""

import os
import sys
import threading
import time

import msgspec

from gdntune.device.arch import Device
from gdntune.errors import MeasurementError


class Start(msgspec.Struct):
    """What an actor asks of `tuning.worker.Start`, which imports torch."""

    device: Device
    index: int
    root: str
    bundles: tuple[str, ...] = ()


def echo(start, x):
    """What it was given, and its process."""
    return start, x, os.getpid()


def pid(start):
    """Its process."""
    return os.getpid()


def die(start):
    """Ends its process."""
    os._exit(3)


def hang(start):
    """Does not end."""
    time.sleep(10**4)


def refuse(start):
    """What gdntune itself refuses."""
    raise MeasurementError("no such time")


def broken(start):
    """A fault of the task's own."""
    raise ZeroDivisionError("x / 0")


def slow_start(start):
    """A process that takes long to begin, as on a busy machine."""
    time.sleep(1.5)


def lock(start):
    """An answer that cannot be pickled."""
    return threading.Lock()


def leave(start):
    """Wants to leave."""
    sys.exit(3)


def say(start):
    """Prints."""
    print("said", flush=True)
