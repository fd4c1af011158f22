"""What happens to a long sweep: variants that break their process, kill -9 at any moment, a full
disk, a torn journal, a second sweep.

Processes are real. After each the table stands on the same trials as an undisturbed one's, by their
keys: none is lost, none is repeated.
"""

import contextlib
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import warm
from fakes import faulty

from gdntune import search
from gdntune.device import arch
from gdntune.errors import JournalError, Locked
from gdntune.objects.store import Store
from gdntune.results import journal
from gdntune.results.journal import Journal
from gdntune.results.records import Build, Cell, Check, Trial
from gdntune.tuning import config

CELLS = 40
CONFIG = """
name: faults
device: cpu
model: {H: 1, HV: 2, K: 64, V: 64}
batch: [BATCHES]
tokens: [1]
contracts: [{state_dtype: fp32}]
kernels: {cpu_recurrent: {vec: [8, 16], tile_v: [16, 32], ilp: [2]}}
search: {screen_rounds: 3, keep: 99, final_rounds: 6, max_cell_seconds: 30}
""".replace("BATCHES", ", ".join(map(str, range(1, CELLS + 1))))
BROKEN = """
name: broken
device: cpu
model: {H: 1, HV: 2, K: 64, V: 64}
batch: [2, 7]
tokens: [1]
contracts: [{state_dtype: fp32}]
kernels: {cpu_recurrent: {vec: [16], tile_v: [16], ilp: [2]}, faulty: {fault: FAULT, late: LATE}}
search: {screen_rounds: 3, keep: 3, final_rounds: 4, max_cell_seconds: 1}
"""
BOOT_S = 600.0
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def store():
    """Compiled objects, kept for all tests."""
    return Store()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, store):
    """A sweep that nothing happens to: its journal's bytes and its records."""
    folder = tmp_path_factory.mktemp("undisturbed")
    records = sweep(folder, store).records
    return (folder / journal.FILE).read_bytes(), records


def sweep(folder, store, text=CONFIG, **options):
    """A sweep of a config's text, in this process."""
    return search.sweep(
        config.parse(text), folder, device=arch.detect("cpu"), store=store, **options
    )


def keys(records):
    """What a sweep did, without times: floors go by their screen, since times choose which of them
    are timed to the end.
    """
    found = Counter()
    for r in records:
        if isinstance(r, Build):
            found["build", r.object_key, r.status] += 1
        elif isinstance(r, Check):
            found["check", r.contract.key(), r.variant, r.status] += 1
        elif isinstance(r, Cell):
            found["cell", r.problem.key(), r.status, r.stop, r.default_variant] += 1
        elif r.role == "decode":
            found["trial", r.problem.key(), r.variant.id, r.stage, r.status, len(r.samples_us)] += 1
        elif r.stage == "screen":
            found["floor", r.problem.key(), r.variant.id, r.status] += 1
    return found


def assert_same_work(folder, undisturbed, store):
    """Going on to the end gives the trials and the table's cells of the undisturbed sweep, each
    once.
    """
    outcome = sweep(folder, store)
    assert keys(outcome.records) == keys(undisturbed[1])
    assert outcome.table is not None
    assert outcome.table.evidence.cells == CELLS
    assert journal.read(folder)[1] == outcome.records
    assert not [name for name in os.listdir(folder) if name.endswith(".new")]


class Running:
    """A sweep in a process of its own."""

    def __init__(self, tmp_path, store, folder, *largest):
        path = tmp_path / "config.yaml"
        path.write_text(CONFIG)
        self.folder = folder
        self.seen: set[int] = set()
        self.said = tmp_path / f"said {next(NUMBERS)}"
        with self.said.open("w") as said:
            self.process = warm.Popen(
                [sys.executable, "-m", "fakes.sweeping", path, folder, store.root, *largest],
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
                stdout=said.fileno(),
            )

    def size(self):
        """Bytes of its journal."""
        try:
            return (self.folder / journal.FILE).stat().st_size
        except FileNotFoundError:
            return 0

    def wait_for_writes(self, writes):
        """Until the journal grew so many times, or the sweep ended."""
        size, until = self.size(), time.monotonic() + BOOT_S
        while writes and self.process.poll() is None:
            assert time.monotonic() < until, "the sweep does not go on"
            time.sleep(0.0005)
            if self.size() != size:
                size, writes = self.size(), writes - 1

    def children(self):
        """Its timing process."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                name = stat.read_text().partition("(")[2].rpartition(")")[0]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if name == f"of {self.process.pid}":
                found.append(int(stat.parent.name))
        return found

    @contextlib.contextmanager
    def held(self):
        """It stands still meanwhile, however busy the machine is."""
        os.kill(self.process.pid, signal.SIGSTOP)
        yield
        os.kill(self.process.pid, signal.SIGCONT)

    def kill_children(self):
        """kill -9 of its timing process; whether there was one."""
        found = self.children()
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        return bool(found)

    def kill(self):
        """kill -9 of the sweep alone; whether it still ran."""
        ran = self.process.poll() is None
        self.seen |= set(self.children())
        self.process.kill()
        self.process.wait()
        return ran

    def finish(self):
        """What it says in the end, and its exit code."""
        code = self.process.wait()
        return self.said.read_text(), code

    def gone(self):
        """Whether every timing process that it had when it was killed has ended, within two
        minutes.
        """
        until = time.monotonic() + 120
        while time.monotonic() < until:
            if not any(map(alive, self.seen)):
                return True
            time.sleep(0.05)
        return False


def alive(pid):
    """Whether a process is there; what has ended may wait for a parent to ask."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def whole_lines(folder):
    """The journal without a torn last line."""
    path = folder / journal.FILE
    data = path.read_bytes() if path.exists() else b""
    return data[: data.rfind(b"\n") + 1]


def killed_again_and_again(tmp_path, store, seed, kills):
    """Starts a sweep and kills it, up to so many times: while it starts, and around writes to its
    journal; then lets it end. Its folder, and how often it was killed.
    """
    pick, last, started = random.Random(seed), b"", []
    # its own config file: one that another thread writes anew is empty for a moment
    tmp_path = tmp_path / str(seed)
    tmp_path.mkdir()
    folder = tmp_path / "killed"
    killed = 0
    for _ in range(kills):
        running = Running(tmp_path, store, folder)
        started.append(running)
        writes = pick.choice([0, 0, 1, 1, 2])
        if writes:
            running.wait_for_writes(writes)
            time.sleep(pick.uniform(0, 0.06))
        else:
            time.sleep(pick.uniform(0, 0.6))
        # On a machine that is busy with other things it may have ended.
        killed += running.kill()
        kept = whole_lines(folder)
        assert kept.startswith(last), "a record that was written is gone"
        last = kept
    assert Running(tmp_path, store, folder).finish() == ("table\n", 0)
    assert all(running.gone() for running in started), "a process outlived its sweep"
    return folder, killed


def test_kill_9_at_random_moments(undisturbed, store, tmp_path):
    """Fault: a sweep killed at any of ten random moments, and started again each time, lost trials
    or repeated them.
    """
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda seed: killed_again_and_again(tmp_path, store, seed, 5), (1, 2)))
    folders = [folder for folder, _ in made]
    assert sum(killed for _, killed in made) >= 5, "it ends before it is killed: give it more cells"
    for folder in folders:
        assert keys(journal.read(folder)[1]) == keys(undisturbed[1])
    assert_same_work(folders[0], undisturbed, store)


def test_kill_9_of_the_worker_and_a_second_sweep(undisturbed, store, tmp_path):
    """The timing process is killed while it checks, and while it times: the sweep goes on and ends
    with the undisturbed one's trials.

    Meanwhile a second sweep in its folder is refused, with the first one's name.
    """
    folder = tmp_path / "run"
    running = Running(tmp_path, store, folder)
    # the header and the builds are written, the checks are next
    running.wait_for_writes(2)
    with running.held():
        assert running.kill_children()
        with pytest.raises(Locked, match=f"in use by process {running.process.pid} on "):
            sweep(folder, store)
    while not any(isinstance(r, Cell) for r in journal.read(folder)[1]):
        assert running.process.poll() is None
        time.sleep(0.002)
    with running.held():
        assert sum(isinstance(r, Cell) for r in journal.read(folder)[1]) < CELLS
        assert running.kill_children()
    assert running.finish() == ("table\n", 0)
    assert keys(journal.read(folder)[1]) == keys(undisturbed[1])


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 64 KiB, less than a journal takes; skipped where a file system cannot be mounted,
    the limit on files' sizes stands in.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk], capture_output=True
    ).returncode:
        pytest.skip("tmpfs cannot be mounted here")
    yield disk
    subprocess.run(["umount", disk], check=True)


def assert_full_disk_is_said(said, folder, undisturbed):
    """The error names the file, the cause and the remedy; the journal holds whole records, the
    undisturbed one's first.
    """
    output, code = said
    assert code == 2
    assert output.startswith("JournalError: ") and str(folder / journal.FILE) in output
    assert "could not be written" in output and "start the same sweep again" in output
    assert whole_lines(folder) == (folder / journal.FILE).read_bytes()
    records = journal.read(folder)[1]
    assert records and keys(records) <= keys(undisturbed[1])


def test_a_file_that_may_not_grow(undisturbed, store, tmp_path):
    """A full disk, as a limit on the journal's size: a clear refusal, a whole journal; with room
    again the same sweep goes on.
    """
    folder = tmp_path / "run"
    said = Running(tmp_path, store, folder, len(undisturbed[0]) // 2).finish()
    assert_full_disk_is_said(said, folder, undisturbed)
    assert "File too large" in said[0]
    assert_same_work(folder, undisturbed, store)


def test_a_full_disk(undisturbed, store, tmp_path, small_disk):
    """A full disk, a small tmpfs: as above."""
    folder = small_disk / "run"
    assert len(undisturbed[0]) > 2**16
    said = Running(tmp_path, store, folder).finish()
    assert_full_disk_is_said(said, folder, undisturbed)
    assert "No space left on device" in said[0]


def test_a_journal_cut_anywhere(undisturbed, store, tmp_path):
    """A journal cut at random bytes opens at its last whole record. One cut within a cell's
    records: that cell alone is timed again.
    """
    data, records = undisturbed
    pick, (run, _) = random.Random(3), journal._parse(data, Path("journal"))
    first = data.index(b"\n") + 1
    torn = data.rindex(b"\n", 0, data.rindex(b'{"kind":"cell"') - 2) - 7
    cuts = [
        torn,
        100,
        first,
        first + 1,
        len(data) - 1,
        *(pick.randrange(first, len(data)) for _ in range(30)),
    ]
    for n, cut in enumerate(cuts):
        folder = tmp_path / str(n)
        folder.mkdir()
        (folder / journal.FILE).write_bytes(data[:cut])
        with Journal.open(folder, run) as opened:
            # a header cut in two is a new journal
            assert opened.records == records[: max(data[:cut].count(b"\n") - 1, 0)]
        assert whole_lines(folder) == (folder / journal.FILE).read_bytes()
    outcome = sweep(tmp_path / "0", store)
    found, wanted = keys(outcome.records), keys(undisturbed[1])
    assert found.keys() == wanted.keys() and outcome.table is not None
    assert {key[1] for key in found - wanted} == {records[-1].problem.key()}
    assert sum(isinstance(r, Cell) for r in outcome.records) == CELLS


def test_a_journal_damaged_inside(undisturbed, store, tmp_path):
    """A record in the middle that was overwritten is no torn end: a refusal that names file and
    line, and the file stays as it is.
    """
    data = bytearray(undisturbed[0])
    middle = data.index(b"\n", len(data) // 2) + 20
    data[middle : middle + 5] = b"\0" * 5
    (tmp_path / journal.FILE).write_bytes(data)
    line = data[:middle].count(b"\n") + 1
    with pytest.raises(JournalError, match=rf"{journal.FILE}: line {line}.*cut this line out"):
        sweep(tmp_path, store)
    assert (tmp_path / journal.FILE).read_bytes() == data


@pytest.fixture
def planted(monkeypatch):
    """The faulty kernels in this process's registry."""
    faulty.plant(monkeypatch.setitem, monkeypatch.setattr)


def test_memory_is_limited_to_what_is_free():
    """Fault: a variant that kept memory took all there is, and the system ended other processes. It
    fails alone, before.
    """
    code = """
import mmap
from gdntune.objects.processes import free_memory, limit_memory
limit_memory(0.5)
kept, size = [], free_memory() // 8
try:
    while len(kept) < 8:
        # counted, but not taken: nobody writes to it
        kept.append(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
except OSError:
    print(len(kept))
"""
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert 1 <= int(said) <= 5


# what the journal says of a fault that shows in the check
SHOWS = {
    "wild": ("crashed", "process died"),
    "leak": ("crashed", "memory"),
    "touches": ("failed", r"state\["),
}


@pytest.mark.usefixtures("planted")
def test_broken_variants_fail_their_check(store, tmp_path):
    """Variants that write out of bounds, keep memory or write to others' slots are journalled with
    what they did; the rest is timed.
    """
    text = (
        BROKEN.replace("FAULT", f"[{', '.join(SHOWS)}]")
        .replace("LATE", "[false]")
        .replace("[2, 7]", "[2]")
    )
    outcome = sweep(tmp_path, store, text, policy=faulty.Planted())
    checks = {r.variant: r for r in outcome.records if isinstance(r, Check)}
    for fault, (status, reason) in SHOWS.items():
        found = checks.pop(f"faulty.{fault}")
        assert found.status == status, found.reason
        assert re.search(reason, found.reason), found.reason
    assert checks and all(r.status == "ok" for r in checks.values())
    assert not {r.variant.id for r in outcome.records if isinstance(r, Trial)} & {
        f"faulty.{f}" for f in SHOWS
    }
    assert outcome.table is not None
    assert any("3 did not pass the check" in note for note in outcome.notes)


@pytest.mark.usefixtures("planted")
def test_a_variant_that_breaks_when_it_is_timed(store, tmp_path):
    """A variant that passes its check and takes the process down at one batch size is a failed
    trial there; the cell is timed without it.
    """
    text = BROKEN.replace("FAULT", "[wild]").replace("LATE", "[true]")
    outcome = sweep(tmp_path, store, text, policy=faulty.Planted())
    victim = "faulty.wild.late"
    assert [r.status for r in outcome.records if isinstance(r, Check) and r.variant == victim] == [
        "ok"
    ]
    trials = [r for r in outcome.records if isinstance(r, Trial) and r.role == "decode"]
    failed = [(r.problem.B, r.variant.id, r.status) for r in trials if r.status != "ok"]
    assert failed == [(faulty.LATE_BATCH, victim, "crashed")]
    assert [(r.problem.B, r.status) for r in outcome.records if isinstance(r, Cell)] == [
        (2, "ok"),
        (7, "ok"),
    ]
    assert victim not in outcome.table.variants
