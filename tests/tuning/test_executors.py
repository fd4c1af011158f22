"""gdntune/executors.py: workers, and how jobs are shared out among them."""

import os
import subprocess
import sys
import threading
import time

import msgspec
import pytest
from fakes import tasks
from fakes.tasks import broken, die, echo, hang, refuse

from gdntune.device import arch
from gdntune.errors import GdntuneError, MeasurementError
from gdntune.tuning import program
from gdntune.tuning.executors import Child, Crashed, on_each, share_out
from gdntune.tuning.team import Team

# Their processes start as a user's do.
pytestmark = pytest.mark.cold


class Fake:
    """A worker whose jobs run in this process."""

    def __init__(self, name):
        self.name, self.closed, self.at_work = name, threading.Event(), False

    def run(self, function, *args, timeout):
        """The function's result."""
        assert not self.at_work, "two jobs at a time on one device"
        self.at_work = True
        try:
            return function(self, *args)
        finally:
            self.at_work = False

    def close(self):
        """What a job may wait for."""
        self.closed.set()


def job(n, seconds=0.0, fails=False):
    """A job that gives its number and its worker's name."""

    def call(worker):
        def task(_):
            time.sleep(seconds)
            if fails:
                raise MeasurementError(f"job {n}")
            return n, worker.name

        return worker.run(task, timeout=1)

    return call


def test_every_job_once():
    """All jobs are done, each once, one at a time on a device, by all of them."""
    workers = [Fake("a"), Fake("b"), Fake("c")]
    results = list(share_out(workers, (job(n, 0.005) for n in range(30))))
    assert sorted(n for n, _ in results) == list(range(30))
    assert {name for _, name in results} == {"a", "b", "c"}
    assert not any(w.closed.is_set() for w in workers)


def test_one_worker_keeps_the_order():
    """With one device the journal is in the order of the plan."""
    assert [n for n, _ in share_out([Fake("a")], (job(n) for n in range(20)))] == list(range(20))


def test_a_slow_job_holds_nobody_up():
    """The other devices go on with the next jobs while one is long at work."""
    others = threading.Event()

    def last(worker):
        assert others.wait(120), "the others wait for it"
        return 0, worker.name

    def jobs():
        yield last
        yield from (job(n) for n in range(1, 8))
        # asked for once the seventh is done
        others.set()

    results = list(share_out([Fake("a"), Fake("b")], jobs()))
    assert results[-1] == (0, "a")
    assert {name for n, name in results if n} == {"b"}


def test_jobs_are_made_late():
    """A job is made when a device is free and all earlier results were taken: what they showed
    holds for it.
    """
    seen, made = [], []

    def jobs():
        for n in range(6):
            made.append((n, list(seen)))
            yield job(n)

    for n, _ in share_out([Fake("a")], jobs()):
        seen.append(n)
    assert made == [(n, list(range(n))) for n in range(6)]


def test_no_jobs_and_no_workers_at_work():
    """Nothing to do is done at once."""
    assert list(share_out([Fake("a"), Fake("b")], iter(()))) == []


def test_an_error_ends_all_at_once():
    """What a job raises is raised, and devices that are at work are closed, so that nobody waits
    for them.
    """
    workers = [Fake("a"), Fake("b")]

    def endless(worker):
        assert worker.closed.wait(120), "not closed"
        return 0, worker.name

    with pytest.raises(MeasurementError, match="job 1"):
        list(share_out(workers, iter([endless, job(1, 0.01, fails=True)])))
    assert workers[0].closed.is_set()


def test_a_consumer_that_stops_closes_the_workers():
    """A journal that cannot be written ends the sweep, whatever still runs."""
    workers = [Fake("a"), Fake("b")]

    def endless(worker):
        assert worker.closed.wait(120), "not closed"
        return 0, worker.name

    results = share_out(workers, iter([endless, job(1)]))
    assert next(results) == (1, "b")
    results.close()
    assert workers[0].closed.is_set() and not workers[1].closed.is_set()


def test_a_worker_that_is_not_fit_gets_no_job():
    """It is asked for each job; where none is fit, what is left is not taken."""
    done, taken = [], []

    def jobs():
        for n in range(9):
            taken.append(n)
            yield job(n, 0.01)

    done.extend(
        share_out(
            [Fake("a"), Fake("b")], jobs(), lambda worker: worker.name != "b" or len(taken) < 3
        )
    )
    assert sorted(n for n, _ in done) == list(range(9))
    assert 1 <= sum(name == "b" for _, name in done) <= 2
    taken.clear()
    assert len(list(share_out([Fake("a")], jobs(), lambda _: len(taken) < 3))) == 3 == len(taken)


def test_on_each():
    """One job on every device, results in their order; none where there are none."""
    assert on_each([Fake("a"), Fake("b")], lambda w: w.name) == ["a", "b"]
    assert on_each([], lambda w: w.name) == []


def test_a_child_survives_its_tasks():
    """A crash, a hang and a fault are values, a refusal is raised; after each the next task has a
    process.
    """
    with Child("start", "cpu:0") as child:
        assert child.run(echo, 1, timeout=60)[:2] == ("start", 1)
        for task, status, reason in (
            (die, "crashed", "exit code 3"),
            (hang, "timeout", "no answer within 3 s"),
            (broken, "crashed", "ZeroDivisionError: x / 0"),
        ):
            got = child.run(task, timeout=3 if task is hang else 60)
            assert isinstance(got, Crashed) and got.status == status and reason in got.reason
            assert child.run(echo, 2, timeout=60)[:2] == ("start", 2)
        with pytest.raises(MeasurementError, match="no such time"):
            child.run(refuse, timeout=60)
        assert child.run(echo, 3, timeout=60)[:2] == ("start", 3)


def test_a_start_has_a_time_of_its_own():
    """Fault: on a busy machine the imports of a fresh process took its first task's time, and an
    honest variant was taken for one that hangs.
    """
    with Child("start", begin=tasks.slow_start) as child:
        for _ in range(2):
            got = child.run(hang, timeout=1)
            assert got == Crashed("timeout", "no answer within 1 s")
        assert child.run(echo, 1, timeout=60)[:2] == ("start", 1)


def test_a_process_that_does_not_start_is_nobodys_fault():
    """Its begin crashes each time: an error, not a value that would blame a variant."""
    with (
        Child("start", "cuda:1", begin=die) as child,
        pytest.raises(GdntuneError, match=r"of cuda:1 does not start: .*exit code 3.*doctor"),
    ):
        child.run(echo, 1, timeout=60)


def test_two_children_share_jobs_and_one_dies():
    """Real processes: one device's crash is its own, and the others' jobs go on."""
    children = [Child(n, f"cpu:{n}") for n in range(2)]
    try:
        jobs = [
            lambda c, n=n: c.run(die if n == 3 else echo, *([] if n == 3 else [n]), timeout=60)
            for n in range(8)
        ]
        results = list(share_out(children, iter(jobs)))
    finally:
        for child in children:
            child.close()
    crashed = [r for r in results if isinstance(r, Crashed)]
    done = [r for r in results if not isinstance(r, Crashed)]
    assert len(crashed) == 1 and sorted(x for _, x, _ in done) == [0, 1, 2, 4, 5, 6, 7]
    assert {start for start, _, _ in done} == {0, 1}


def test_a_closed_child_starts_nothing():
    """Closed by another thread while a task runs: the task ends as a crash, and no process is
    started again.
    """
    child = Child("start")
    child.run(echo, 0, timeout=60)
    threading.Timer(0.3, child.close).start()
    got = child.run(hang, timeout=600)
    assert isinstance(got, Crashed) and got.status == "crashed"
    assert isinstance(child.run(echo, 1, timeout=5), Crashed)


HOST = """
import multiprocessing, sys, threading, time
from gdntune.tuning.executors import Child
from fakes import tasks

SPAWN = multiprocessing.get_context("spawn")


def own(x):
    sys.exit(x)


def times():
    with Child("start") as child:
        got = child.run(tasks.echo, 1, timeout=120)
        assert got[:2] == ("start", 1), got
"""
HOSTS = {
    "a daemonic process": """
if __name__ == "__main__":
    process = SPAWN.Process(target=times, daemon=True)
    process.start()
    process.join()
    sys.exit(process.exitcode)
""",
    "a spawn in another thread": """
if __name__ == "__main__":
    with Child("start") as child:
        child.run(tasks.echo, 1, timeout=120)
        thread = threading.Thread(target=child.run, args=(tasks.hang,), kwargs={"timeout": 600})
        thread.start()
        time.sleep(1)
        process = SPAWN.Process(target=own, args=(0,))
        process.start()
        process.join()
    sys.exit(process.exitcode)
""",
    "a script without a guard": """
print("once")
times()
""",
}


@pytest.mark.parametrize("body", HOSTS.values(), ids=HOSTS)
def test_hosts_of_all_kinds_time(body, tmp_path):
    """Faults: no sweep in a daemonic process ("not allowed to have children"), and a host's own
    spawn in another thread failed for as long as a cell was timed: its main module was hidden.
    """
    script = tmp_path / "host.py"
    script.write_text(HOST + body)
    path = os.pathsep.join(map(str, sys.path))
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("once") == ("once" in body)


def test_answers_that_cannot_be_sent(capfd):
    """What cannot be pickled, an exit and a print of a task are its own: the caller's standard output
    stays clean.
    """
    with Child("start") as child:
        got = child.run(tasks.lock, timeout=60)
        assert isinstance(got, Crashed) and "pickle" in got.reason
        got = child.run(tasks.leave, timeout=60)
        assert got == Crashed("crashed", "SystemExit: 3")
        assert child.run(tasks.say, timeout=60) is None
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "said\n")


class Heard:
    """A connection on which a child says this, each some seconds after the one before."""

    def __init__(self, clock, *said):
        self.clock, self.said, self.limits = clock, list(said), []

    def poll(self, limit):
        self.limits.append(limit)
        seconds, _ = self.said[0]
        late = limit is not None and seconds > limit
        self.clock.append(self.clock[-1] + (limit if late else seconds))
        return not late

    def recv(self):
        return self.said.pop(0)[1]


def test_a_turn_that_a_task_waits_for_is_not_its_own_time(monkeypatch):
    """A task that waits for the device, which others use for minutes, has its whole time limit once
    it has the device; a wait has no limit.
    """
    clock = [0.0]
    monkeypatch.setattr(program.time, "monotonic", lambda: clock[-1])
    waits, has = program._Waits(True), program._Waits(False)
    one = object.__new__(program.Program)
    one._connection = Heard(clock, (2, waits), (500, has), (7, program._Answer("done")))
    assert one._answered(10).value == "done"
    assert one._connection.limits == [10, None, 8]
    one._connection = Heard(clock, (2, waits), (500, has), (9, program._Answer("late")))
    with pytest.raises(program.Ended, match="no answer within 10 s"):
        one._answered(10)


def test_a_journal_of_another_card_names_its_cells(monkeypatch):
    """Fault: a sweep that was resumed on another card of the model had samples of both, and nothing
    said which were whose.
    """
    old, new = arch.Card(uuid="GPU-a"), arch.Card(uuid="GPU-b")
    for there, here, names in (
        ((old,), [old], ["cuda:0", "cuda:0"]),
        ((old,), [new], ["cuda:0 GPU-b", "cuda:0 GPU-b"]),
        (msgspec.UNSET, [new], ["cuda:0", "cuda:0"]),
        ((old,), [], ["cuda:0", "cuda:0"]),
    ):
        team = Team([Fake("cuda:0"), Fake("cuda:0")], None, "local", turns=object())
        said = list(team.of_other_cards(there, here))
        assert [worker.name for worker in team.workers] == names
        assert team.several == bool(said) == (names[0] != "cuda:0")
