"""gdntune/journal.py: what is written reads back, and no fault costs more than the record being
written.
"""

import contextlib
import errno
import gc
import hashlib
import json
import lzma
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdntune.device.arch import target
from gdntune.errors import JournalError, Locked
from gdntune.kernels.spec import Variant
from gdntune.problem import Contract, Problem
from gdntune.results import journal
from gdntune.results.journal import Journal
from gdntune.results.records import Build, Cell, Check, Run, Trial, made_by

RUN = Run(
    config="small",
    config_sha256="c0ffee",
    device=target("sm_90a"),
    software={"torch": "2"},
    policy={"timer": "cupti", "l2": "cold-clean"},
    kernels={"recurrent": "f1"},
    peaks={"datasheet": 3352.0},
    started="2026-11-28T00:00:00+00:00",
    command="gdntune sweep",
)
PROBLEM = Problem(Contract(state_dtype="fp32"), 4, 2, 8)
VARIANT = Variant("recurrent", "recurrent.tv8", {"tile_v": 8, "wide": True, "order": "early"})
RECORDS = [
    Build(
        kernel="recurrent",
        variant=VARIANT.id,
        object_key="k",
        status="ok",
        seconds=0.5,
        registers=40,
        spill_bytes=0,
    ),
    Build(
        kernel="recurrent",
        variant="recurrent.tv9",
        object_key="k",
        status="failed",
        reason="ptxas: no\n",
    ),
    Check(contract=PROBLEM.contract, variant=VARIANT.id, status="ok", error=1e-7),
    Trial(
        problem=PROBLEM,
        variant=VARIANT,
        role="floor",
        stage="screen",
        status="timeout",
        reason="30 s",
    ),
    Trial(
        problem=PROBLEM,
        variant=VARIANT,
        stage="final",
        status="ok",
        samples_us=[3.0, 3.125],
        seconds=1.0,
    ),
    Cell(
        problem=PROBLEM,
        status="ok",
        stop="final_rounds",
        clocks_before={"sm_mhz": 1980, "event_reasons": []},
    ),
]


@contextlib.contextmanager
def written(folder, records=RECORDS):
    """An open journal that holds `records`."""
    with Journal.open(folder, RUN) as j:
        for record in records:
            j.append(record)
        yield j


def test_every_kind_of_record_reads_back(tmp_path):
    """What is appended is what `read` gives, by folder and by file, and what a resumed journal
    holds.
    """
    with written(tmp_path / "new" / "folder") as j:
        assert j.records == RECORDS
    assert journal.read(j.path) == journal.read(j.path.parent) == (RUN, RECORDS)
    with Journal.open(j.path.parent, RUN) as again:
        assert (again.run, again.records) == (RUN, RECORDS)
        again.append(RECORDS[0])
    assert journal.read(j.path) == (RUN, [*RECORDS, RECORDS[0]])


def test_a_line_is_plain_json(tmp_path):
    """Each record is one line of JSON that says its kind; samples are kept to the nanosecond."""
    trial = msgspec.structs.replace(RECORDS[4], samples_us=[1.23456789, 2.0])
    with written(tmp_path, [trial]) as j:
        assert j.records[0].samples_us == [1.235, 2.0]
    header, line = map(json.loads, j.path.read_text().splitlines())
    assert (header["kind"], header["schema"]) == ("run", "gdntune.journal/1")
    assert (line["kind"], line["samples_us"], line["variant"]["knobs"]["tile_v"]) == (
        "trial",
        [1.235, 2.0],
        8,
    )


def test_digest_is_the_files(tmp_path):
    """The digest that tables carry is the SHA-256 of the file."""
    with written(tmp_path) as j:
        assert journal.digest(j.run, j.records) == hashlib.sha256(j.path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "samples, reason",
    (
        ([1.0, 1.234, 0.001], ""),
        ([1.0, 1.2345], ""),
        ([1e-05], ""),
        ([1.0], "\udcff of a compiler"),
        ([], "no times"),
    ),
)
def test_digest_of_many_is_that_of_each(samples, reason):
    """Lines made at once are those made one at a time: samples finer than a nanosecond are rounded,
    and bytes that are no text are replaced.
    """
    odd = msgspec.structs.replace(RECORDS[4], samples_us=samples, reason=reason)
    records = [*RECORDS, odd] * 3
    lines = b"".join(map(journal.encode, [RUN, *records]))
    assert journal.digest(RUN, records) == hashlib.sha256(lines).hexdigest()


def test_an_empty_line_is_damage(tmp_path):
    """Decoding all lines at once passes over empty ones; a journal with one is still refused."""
    with written(tmp_path) as j:
        header, *rest = j.path.read_bytes().splitlines(keepends=True)
    for lines in ([header, b"\n", *rest], [header, *rest, b"\n"]):
        j.path.write_bytes(b"".join(lines))
        with pytest.raises(JournalError, match="line"):
            journal.read(tmp_path)


def test_the_first_header_stays(tmp_path):
    """A resumed journal keeps its header; start time, command and measured peaks need not agree."""
    with written(tmp_path):
        pass
    device = msgspec.structs.replace(RUN.device, peak_gb_s=3000.0, peak_source="measured")
    later = msgspec.structs.replace(
        RUN, started="later", command="again", peaks={"measured": 1.0}, device=device
    )
    with Journal.open(tmp_path, later) as j:
        assert j.run == RUN


BENCH = {**RUN.software, "table for gdn_decode": "none: the default rule", "peer fla": "0.3"}
# What the journal was started with, what is asked for now, and what is said of it, all of it.
APART = {
    "part": (
        {},
        {"config": "small.gdn", "config_sha256": "other"},
        "config: small in the journal, small.gdn now (--part, or another config)",
    ),
    "rounds": (
        {"rounds": 50},
        {"rounds": 60, "config_sha256": "other"},
        "rounds: 50 in the journal, 60 now (search.final_rounds of the config)",
    ),
    "a bench's rounds": (
        {"rounds": 50, "software": BENCH},
        {"rounds": 60, "software": BENCH, "config_sha256": "other"},
        "rounds: 50 in the journal, 60 now (--rounds, or search.final_rounds of the config)",
    ),
    "an older journal's config": (
        {},
        {"rounds": 60, "config_sha256": "other"},
        "content of the config: sha256 c0ffee in the journal, sha256 other now (it was edited)",
    ),
    "device, with all that follows from it": (
        {},
        {
            "device": msgspec.structs.replace(
                target("sm_90a"), kind="cpu", name="EPYC", arch="x86"
            ),
            "kernels": {"cpu_recurrent": "f3"},
            "policy": {"timer": "cpu", "l2": "cold-clean"},
        },
        "device: NVIDIA H100 80GB HBM3, sm_90a, 132 SMs, 52428800 bytes of L2, 85899345920 of memory in the journal, EPYC, x86, 132 SMs, "
        "52428800 bytes of L2, 85899345920 of memory now (--device, --index, or another machine)",
    ),
    "kernels": (
        {},
        {"kernels": {"recurrent": "f2"}},
        "code of recurrent: f1 in the journal, f2 now (it was edited)",
    ),
    "policy": (
        {},
        {"policy": {"timer": "events", "l2": "warm"}},
        "timer: cupti in the journal, events now (--timer, or policy.timer of the config); "
        "l2: cold-clean in the journal, warm now (--l2, or policy.l2 of the config)",
    ),
    "software": ({}, {"software": {}}, "torch: 2 in the journal, none now"),
    "peers and table": (
        {"software": BENCH},
        {"software": {**RUN.software, "table for gdn_decode": "a.json", "peer vllm": "1"}},
        "table for gdn_decode: none: the default rule in the journal, a.json now (--table, or the table in use); "
        "peer fla: 0.3 in the journal, none now (--peers, or another version of it); "
        "peer vllm: none in the journal, 1 now (--peers, or another version of it)",
    ),
    "a bench in a sweep's folder": (
        {},
        {"software": BENCH, "config_sha256": "other", "policy": {"timer": "events", "l2": "warm"}},
        "command: gdntune sweep in the journal, gdntune bench now",
    ),
}


@pytest.mark.parametrize("there, here, said", APART.values(), ids=APART)
def test_another_sweeps_journal_is_refused(tmp_path, there, here, said):
    """Fault: `bench --rounds 60` in a folder of `--rounds 50` said `config_sha256`, other peers
    `software`.

    What the user changed is said as he would ask for it, with what the journal has and a way out;
    what follows from it is not. The file is untouched and the lock released.
    """
    run = msgspec.structs.replace(RUN, **there)
    with Journal.open(tmp_path, run) as j:
        before = j.path.read_bytes()
    with pytest.raises(JournalError) as e:
        Journal.open(tmp_path, msgspec.structs.replace(RUN, **here))
    assert str(e.value) == (
        f"{j.path}: of another {made_by(run)}: {said}. Give this one a folder of its own (--out), or ask for what the "
        f"journal was started with: gdntune sweep ({RUN.started})"
    )
    assert j.path.read_bytes() == before
    with Journal.open(tmp_path, run):
        pass


def test_a_claimed_journal_stays_as_it_is(tmp_path):
    """A claim locks the folder, refuses what would be refused later and changes nothing; `begin`
    cuts a torn line off, or writes.
    """
    with written(tmp_path) as j:
        data = j.path.read_bytes()
    j.path.write_bytes(data[:-3])
    unresolved = msgspec.structs.replace(RUN, policy={"l2": "cold-clean"}, peaks={})
    with Journal.claim(tmp_path, unresolved) as claimed:
        assert (claimed.fresh, claimed.run, claimed.records) == (False, RUN, RECORDS[:-1])
        with pytest.raises(Locked):
            Journal.claim(tmp_path, unresolved)
        with pytest.raises(JournalError, match="not begun"):
            claimed.append(RECORDS[0])
        assert j.path.read_bytes() == data[:-3]
        with pytest.raises(JournalError, match="timer: cupti in the journal, events now"):
            claimed.begin(msgspec.structs.replace(RUN, policy={**RUN.policy, "timer": "events"}))
        assert j.path.read_bytes() == data[:-3]
        claimed.begin(RUN)
        claimed.append(RECORDS[-1])
    assert j.path.read_bytes() == data
    for wrong in ({"l2": "warm"}, {"timer": "events", "l2": "cold-clean"}):
        with pytest.raises(JournalError, match="in the journal, (warm|events) now"):
            Journal.claim(tmp_path, msgspec.structs.replace(RUN, policy=wrong))
    with Journal.claim(tmp_path / "new", unresolved) as claimed:
        assert claimed.fresh and not claimed.path.exists()
        claimed.begin(RUN)
    assert journal.read(tmp_path / "new") == (RUN, [])


def test_a_journal_that_cannot_be_written_is_no_claim(tmp_path):
    """What stands where the journal should be is refused at once, and the lock released."""
    (tmp_path / journal.FILE).mkdir()
    for _ in range(2):
        with pytest.raises(
            JournalError, match=r"journal.jsonl: Is a directory; choose another folder \(--out\)"
        ):
            Journal.claim(tmp_path, RUN)


def test_an_older_header_stays(tmp_path):
    """A header without the fields that came later is written as it was, reads back, and goes on
    under a header that has them.
    """
    line = journal.encode(RUN)
    assert not {"cells", "rounds"} & json.loads(line).keys()
    (tmp_path / journal.FILE).write_bytes(line)
    with Journal.open(tmp_path, msgspec.structs.replace(RUN, cells=8, rounds=200)) as j:
        assert j.run == RUN
    assert (
        j.path.read_bytes() == line and journal.digest(RUN, []) == hashlib.sha256(line).hexdigest()
    )


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


def test_what_json_cannot_hold_is_refused(tmp_path):
    """JSON has no NaN: such a record is refused before anything is written. Text that is not UTF-8
    is replaced.
    """
    with written(tmp_path, []) as j:
        before = j.path.read_bytes()
        for value in (float("nan"), float("inf")):
            with pytest.raises(JournalError, match="finite"):
                j.append(msgspec.structs.replace(RECORDS[4], samples_us=[value]))
        assert j.path.read_bytes() == before
        j.append(msgspec.structs.replace(RECORDS[1], reason="g++: \udce9"))
    assert journal.read(tmp_path)[1][0].reason == "g++: ?"


@given(st.lists(st.floats(min_value=0, max_value=1e9), max_size=5), st.text(max_size=20))
def test_any_trial_reads_back_within_a_nanosecond(samples, reason):
    """Any samples and any reason survive, and writing what was read gives the same line."""
    trial = Trial(
        problem=PROBLEM,
        variant=VARIANT,
        stage="screen",
        status="ok",
        samples_us=samples,
        reason=reason,
    )
    line = journal.encode(trial)
    back = msgspec.json.decode(line, type=Trial)
    assert line.count(b"\n") == 1
    assert all(abs(a - b) <= 0.000501 for a, b in zip(samples, back.samples_us, strict=True))
    assert journal.encode(back) == line


def test_closed_journal_takes_no_record(tmp_path):
    """An append after close is refused; closing twice is fine; the holder's file is gone."""
    with written(tmp_path) as j:
        assert (tmp_path / journal.HOLDER).exists()
    j.close()
    with pytest.raises(JournalError, match="was closed"):
        j.append(RECORDS[0])
    assert not (tmp_path / journal.HOLDER).exists()


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


def test_a_folder_that_is_a_file(tmp_path):
    """Fault: a file where a folder is wanted was `File exists`. It is called a file, and so is one
    that the folder would lie in.
    """
    (tmp_path / "file").write_text("")
    with pytest.raises(
        JournalError,
        match="file: cannot be written: it is a file, and a folder is wanted; choose a folder",
    ):
        Journal.open(tmp_path / "file", RUN)
    with pytest.raises(
        JournalError, match="sweep: cannot be written: .*/file is a file, .*choose a folder"
    ):
        Journal.open(tmp_path / "file" / "sweep", RUN)


def test_second_opener_is_told_of_the_first(tmp_path):
    """A second opener, of this process or another, is refused with pid, host and time of the first;
    reading is free.
    """
    with written(tmp_path) as j:
        holder = json.loads((tmp_path / journal.HOLDER).read_text())
        assert (holder["pid"], holder["host"]) == (os.getpid(), socket.gethostname())
        told = f"in use by process {os.getpid()} on {socket.gethostname()}, since {holder['since']}; wait for it"
        with pytest.raises(Locked) as e:
            Journal.open(tmp_path, RUN)
        assert told in str(e.value)
        (tmp_path / journal.HOLDER).write_text("{")
        with pytest.raises(Locked, match="in use by another process;"):
            Journal.open(tmp_path, RUN)
        assert journal.read(tmp_path)[1] == RECORDS
        j.append(RECORDS[0])


WRITER = """
import sys
sys.path[:0] = {path!r}
from test_journal import *
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


def test_a_published_journal_is_read_as_xz(tmp_path):
    """Published journals are kept compressed; a damaged one is refused with the file's name."""
    with written(tmp_path):
        pass
    plain = tmp_path / journal.FILE
    packed = tmp_path / "published.jsonl.xz"
    packed.write_bytes(lzma.compress(plain.read_bytes()))
    assert journal.read(packed) == journal.read(plain)
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(JournalError, match=r"published\.jsonl\.xz.*xz"):
        journal.read(packed)


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


def test_a_sweep_outlives_an_upgrade(tmp_path):
    """The kernels' code decides whether samples may stand together, not gdntune's version."""
    for version in ("0.1.0", "0.2.0"):
        run = msgspec.structs.replace(RUN, software={**RUN.software, "gdntune": version})
        with Journal.open(tmp_path, run) as j:
            assert j.run.software["gdntune"] == "0.1.0"


def test_a_folder_deleted_before_its_journal_began(tmp_path):
    """Fault: a folder that was deleted while objects were compiled was an unexplained ENOENT, after
    all of them had been.
    """
    folder = tmp_path / "run"
    with Journal.claim(folder, RUN) as j:
        j.require_place()
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        for look in (j.require_place, lambda: j.begin(RUN)):
            with pytest.raises(
                JournalError, match="folder was deleted or moved while objects were"
            ):
                look()
    assert not folder.exists()


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


def test_reading_leaves_the_collector_as_it_was(tmp_path):
    """Records are read without looks for cycles, which took half of the time; afterwards, also
    after a fault, the collector does what it did.
    """
    assert gc.isenabled()
    with pytest.raises(JournalError):
        journal.read(tmp_path / "none.jsonl")
    assert gc.isenabled()
    with journal.uncollected(), journal.uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()
