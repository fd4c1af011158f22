"""gdntune/results/journal.py: no fault costs more than the record being written, and a damaged file is
refused in words.
"""

import errno
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from journals import RECORDS, RUN, written

from gdntune.errors import JournalError, Locked
from gdntune.results import journal
from gdntune.results.journal import Journal


def test_an_empty_line_is_damage(tmp_path):
    """Decoding all lines at once passes over empty ones; a journal with one is still refused."""
    with written(tmp_path) as j:
        header, *rest = j.path.read_bytes().splitlines(keepends=True)
    for lines in ([header, b"\n", *rest], [header, *rest, b"\n"]):
        j.path.write_bytes(b"".join(lines))
        with pytest.raises(JournalError, match="line"):
            journal.read(tmp_path)


def test_torn_at_any_byte(tmp_path, monkeypatch):
    """A last line cut at any byte loses that record alone: it is left out by `read` and cut off by
    `open`.
    """
    monkeypatch.setattr(journal.os, "fsync", lambda _: None)
    with written(tmp_path) as j:
        data = j.path.read_bytes()
    start = data.rfind(b"\n", 0, -1) + 1
    for end in range(start, len(data)):
        j.path.write_bytes(data[:end])
        assert journal.read(tmp_path) == (RUN, RECORDS[:-1])
        assert j.path.read_bytes() == data[:end]
        with Journal.open(tmp_path, RUN) as again:
            again.append(RECORDS[-1])
        assert j.path.read_bytes() == data


def test_torn_header(tmp_path):
    """A journal killed while its header was written starts anew; `read` says that it holds nothing."""
    with written(tmp_path, []) as j:
        data = j.path.read_bytes()
    for end in (0, 1, len(data) - 1):
        j.path.write_bytes(data[:end])
        with pytest.raises(JournalError, match="holds no whole line"):
            journal.read(tmp_path)
        with Journal.open(tmp_path, RUN):
            assert j.path.read_bytes() == data


@pytest.mark.parametrize("number", [1, 3, 6])
@pytest.mark.parametrize(
    "damage", [b"", b"{", b"\0\0\0", b"\xff", b"[" * 3000, b'{"kind":"trail"}', b'{"kind":"cell"}']
)
def test_a_damaged_line_is_refused_by_number(tmp_path, number, damage):
    """A whole line that does not parse is no torn one: its number is named, and nothing is changed."""
    with written(tmp_path) as j:
        lines = j.path.read_bytes().split(b"\n")
    lines[number - 1] = damage
    data = b"\n".join(lines)
    j.path.write_bytes(data)
    for opener in (lambda: journal.read(tmp_path), lambda: Journal.open(tmp_path, RUN)):
        with pytest.raises(
            JournalError, match=rf"journal.jsonl: line {number}: .*restore the file"
        ):
            opener()
    assert j.path.read_bytes() == data


def test_a_fault_in_a_line_is_explained(tmp_path):
    """A wrong value in a line is told with its path and what is expected."""
    with written(tmp_path) as j:
        j.path.write_bytes(j.path.read_bytes().replace(b'"status":"timeout"', b'"status":"time"'))
    with pytest.raises(
        JournalError,
        match=r"line 5: \$.status is 'time' .*expected one of ok, failed, crashed, timeout",
    ):
        journal.read(tmp_path)


def test_headers_stand_first_and_once(tmp_path):
    """A journal without a header, or with two, is refused."""
    with written(tmp_path) as j:
        header, rest = j.path.read_bytes().split(b"\n", 1)
    for data, number in ((rest, 1), (header + b"\n" + header + b"\n", 2)):
        j.path.write_bytes(data)
        with pytest.raises(
            JournalError, match=f"line {number}: a run's header must be the first line and no other"
        ):
            journal.read(tmp_path)


def test_full_disk(tmp_path, monkeypatch):
    """A write that stops half-way leaves the file as it was, says what to do, and a later append
    succeeds.
    """
    real = os.write

    def half(descriptor, data):
        if len(data) > 20:
            return real(descriptor, bytes(data[:20]))
        raise OSError(errno.ENOSPC, "No space left on device")

    with written(tmp_path) as j:
        before = j.path.read_bytes()
        with monkeypatch.context() as m:
            m.setattr(journal.os, "write", half)
            with pytest.raises(
                JournalError, match="No space left on device; .*all 6 before it: free some space"
            ):
                j.append(RECORDS[0])
        assert j.path.read_bytes() == before
        assert j.records == RECORDS
        j.append(RECORDS[0])
    assert journal.read(tmp_path) == (RUN, [*RECORDS, RECORDS[0]])


def test_file_size_limit(tmp_path):
    """The system's own partial write (a file size limit) leaves the file as it was."""
    with written(tmp_path) as j:
        before = j.path.read_bytes()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))
        try:
            with pytest.raises(JournalError, match="File too large"):
                j.append(RECORDS[0])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, old)
        assert j.path.read_bytes() == before


@pytest.mark.parametrize(
    "raised", [KeyboardInterrupt(), OSError(errno.EIO, "Input/output error")], ids=repr
)
def test_interrupted_before_the_disk_has_it(tmp_path, monkeypatch, raised):
    """A record whose fsync does not return is taken back."""
    with written(tmp_path) as j:
        before, real, calls = j.path.read_bytes(), os.fsync, []

        def fsync(descriptor):
            calls.append(descriptor)
            if len(calls) == 1:
                raise raised
            real(descriptor)

        monkeypatch.setattr(journal.os, "fsync", fsync)
        with pytest.raises(JournalError if isinstance(raised, OSError) else KeyboardInterrupt):
            j.append(RECORDS[0])
        assert j.path.read_bytes() == before


def test_an_end_that_cannot_be_restored(tmp_path, monkeypatch):
    """Where neither writing nor cutting off works, nothing more is appended, and the next open cuts
    off the half line.
    """
    real = os.write

    def half(descriptor, data):
        if len(data) > 20:
            return real(descriptor, bytes(data[:20]))
        raise OSError(errno.EIO, "Input/output error")

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    with written(tmp_path) as j:
        with monkeypatch.context() as m:
            m.setattr(journal.os, "write", half)
            m.setattr(journal.os, "ftruncate", fail)
            with pytest.raises(JournalError, match="Input/output error"):
                j.append(RECORDS[0])
        with pytest.raises(JournalError, match="closed for writing.*open it again"):
            j.append(RECORDS[0])
    with Journal.open(tmp_path, RUN) as again:
        assert again.records == RECORDS


@pytest.mark.parametrize("name", ["missing", "journal.jsonl"])
def test_no_journal(tmp_path, name):
    """A path without a journal says what is expected."""
    with pytest.raises(JournalError, match="expected a sweep's folder, its journal.jsonl"):
        journal.read(tmp_path / name)


@pytest.mark.parametrize(
    "data",
    [b"batch,tokens\n1,1\n", b"name: tiny\n", b'{\n "a": 1}\n', b"[1]", b"\x89PNG", b"{}\n"],
    ids=repr,
)
def test_a_file_that_is_no_journal(tmp_path, data):
    """Fault: of a CSV or a config that was given as a journal the user was told to cut out the
    first line. Nothing is written to it.
    """
    path = tmp_path / journal.FILE
    path.write_bytes(data)
    for use in (journal.read, lambda p: Journal.open(p.parent, RUN)):
        with pytest.raises(JournalError) as e:
            use(path)
        said = str(e.value)
        assert said.startswith(f"{path} is no journal: it begins with ")
        assert "expected a sweep's folder, its journal.jsonl" in said and "cut" not in said
    assert path.read_bytes() == data


def test_a_damaged_header(tmp_path):
    """A header that is damaged behind its begin is one all the same, which cannot be done without;
    a torn one is no other file.
    """
    with written(tmp_path) as j:
        data = j.path.read_bytes()
    j.path.write_bytes(data.replace(b'"schema"', b'"scheme"', 1))
    with pytest.raises(JournalError, match=r"line 1: .*; restore the file$"):
        journal.read(j.path)
    for size in (5, 60):
        j.path.write_bytes(data[:size])
        with pytest.raises(JournalError, match="holds no whole line"):
            journal.read(j.path)


WRITER = """
import sys
sys.path[:0] = {path!r}
import msgspec
from gdntune.results.journal import Journal
from journals import RECORDS, RUN
with Journal.open(sys.argv[1], RUN) as j:
    trial = msgspec.structs.replace(RECORDS[4], samples_us=[float(i) for i in range(20000)])
    while True:
        j.append(msgspec.structs.replace(trial, seconds=float(len(j.records))))
        print(len(j.records), flush=True)
"""


def test_killed_writers_lose_only_the_record_at_hand(tmp_path):
    """kill -9 at random moments: each time the lock is free, all acknowledged records are there,
    and the next one goes on.
    """
    code = WRITER.format(path=[str(Path(__file__).parents[1]), *sys.path])
    chance = random.Random(0)
    for _ in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE
        )
        assert writer.stdout.readline()  # it holds the lock now
        with pytest.raises(Locked, match=f"process {writer.pid} on"):
            Journal.open(tmp_path, RUN)
        time.sleep(chance.uniform(0, 0.2))
        writer.kill()
        acknowledged = int((writer.stdout.read().split() or [b"0"])[-1])
        writer.wait()
        writer.stdout.close()
        with Journal.open(tmp_path, RUN) as j:
            assert len(j.records) >= acknowledged
            assert [r.seconds for r in j.records] == [float(i) for i in range(len(j.records))]
            assert j.path.read_bytes().endswith(b"}\n")


def test_records_of_a_newer_version(tmp_path):
    """Fault: an unknown kind was `accepted are ;`, and of a newer schema the advice was to restore
    the file.
    """
    with Journal.open(tmp_path, RUN) as j:
        path = j.path
    header = path.read_bytes()
    path.write_bytes(header + b'{"kind":"power","watts":3}\n')
    with pytest.raises(
        JournalError, match="line 2: a record of kind 'power', .* a newer gdntune wrote it"
    ):
        journal.read(path)
    newer = header.replace(b"gdntune.journal/1", b"gdntune.journal/2")
    path.write_bytes(newer)
    with pytest.raises(
        JournalError, match="gdntune.journal/2 was written by .*pip install -U gdntune"
    ):
        journal.read(path)


def test_the_newer_version_is_named(tmp_path):
    """Fault: no journal said which gdntune wrote it, and of a key or kind that a later version
    writes the advice was to cut the line out.
    """
    later = msgspec.structs.replace(RUN, software={**RUN.software, "gdntune": "10.2"})
    with Journal.open(tmp_path, later) as j:
        path = j.path
    header = path.read_bytes()
    advice = r"gdntune 10\.2 wrote it, and this is gdntune .*pip install -U gdntune"
    for line in (
        b'{"kind":"power","watts":3}\n',
        journal.encode(RECORDS[0]).replace(b'"seconds"', b'"joules":1,"seconds"'),
    ):
        path.write_bytes(header + line)
        with pytest.raises(JournalError, match=f"line 2: .*{advice}") as e:
            journal.read(path)
        assert "cut this line out" not in str(e.value) and "restore" not in str(e.value)
    path.write_bytes(header.replace(b'"started"', b'"place":"hall 2","started"'))
    with pytest.raises(JournalError, match=f"line 1: .*`place`.*{advice}"):
        journal.read(path)
    path.write_bytes(header.replace(b"gdntune.journal/1", b"gdntune.journal/2"))
    with pytest.raises(JournalError, match=r"gdntune.journal/2 was written by gdntune 10\.2"):
        journal.read(path)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b'"B":4', b'"B":9223372036854775808', "problem.B is 9223372036854775808: expected an integer <= 2147483647"),
        (b'"B":4', b'"B":-1', "problem.B is -1: expected an integer >= 1"),
        (b'"sm_count":132', b'"sm_count":0', "device.sm_count is 0: expected an integer >= 1"),
        (b"[3.0,3.125]", b"[3.0,NaN]", "samples_us[1] is nan: expected a finite number"),
    ],
)  # fmt: skip
def test_numbers_that_nothing_can_be_made_of(tmp_path, old, new, said):
    """Faults: a journal's 2^63 requests, and a device of no SMs, were tracebacks of a report; NaN was
    a byte's offset.
    """
    with written(tmp_path) as j:
        path = j.path
    path.write_bytes(path.read_bytes().replace(old, new))
    with pytest.raises(JournalError, match=rf"line \d: \$\.{re.escape(said)}"):
        journal.read(path)
