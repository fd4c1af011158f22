"""What a run tells of itself. Apart from the run, whose imports take seconds in which nothing
would be seen.
"""


class Progress:
    """What a run tells of itself while it runs; this one is silent.

    work: the seconds that a stage, or a step of it, is expected to take; 0: its steps are alike.
    """

    def begin(self) -> None:
        """Something is shown from now on, though no stage has begun."""

    def start(self, label: str, total: int, work: float = 0.0) -> None: ...
    def step(self, n: int = 1, work: float = 0.0) -> None: ...
    def end(self) -> None: ...
    def stop(self) -> None:
        """Takes away what is shown of a stage that an error ended."""
