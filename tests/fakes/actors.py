"""Tasks that run in an actor. Apart from the tests, whose imports take each new actor 3 s."""

import os
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


def stubborn(start):
    """Does not end."""
    time.sleep(10**4)


def impossible(start):
    """What gdntune refuses."""
    raise MeasurementError("3 of 12 segments have no record")


def faulty(start):
    """A fault of the task's own."""
    raise ZeroDivisionError("x / 0")


def pid(start):
    """The actor's process."""
    return os.getpid()
