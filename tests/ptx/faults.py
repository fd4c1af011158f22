"""What the interpreter refuses to let a kernel do."""


class Fault(Exception):
    """An access or a wait that would be undefined on a GPU: where, by which thread, and why."""


class Unmodelled(NotImplementedError):
    """An instruction that the interpreter has no row for."""
