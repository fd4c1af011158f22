"""A graphs.Recorder of a device whose work takes stated times."""


class FakeRecorder:
    """Records what work costs, and replays of costs. drift: microseconds that each replay takes
    longer than the one before.
    """

    def __init__(self, drift=0.0):
        self.tape, self.replayed, self.recordings, self.drift = [], [], 0, drift

    def spend(self, us, name=""):
        self.tape.append((us, name))

    def record(self, works):
        self.recordings += len(works)
        costs = []
        for work in works:
            self.tape = []
            work()
            costs.append(tuple(self.tape))
        return costs

    def times_us(self, replays):
        self.replayed += replays
        return [
            1000 + i * self.drift + sum(us for us, _ in replay) for i, replay in enumerate(replays)
        ]
