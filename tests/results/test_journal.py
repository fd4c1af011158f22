"""gdntune/results/journal.py: what is written reads back."""

import gc
import hashlib
import json
import lzma

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from journals import PROBLEM, RECORDS, RUN, VARIANT, written

from gdntune.errors import JournalError
from gdntune.results import journal
from gdntune.results.journal import Journal
from gdntune.results.records import Trial


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
    [
        ([1.0, 1.234, 0.001], ""),
        ([1.0, 1.2345], ""),
        ([1e-05], ""),
        ([1.0], "\udcff of a compiler"),
        ([], "no times"),
    ],
)
def test_digest_of_many_is_that_of_each(samples, reason):
    """Lines made at once are those made one at a time: samples finer than a nanosecond are rounded,
    and bytes that are no text are replaced.
    """
    odd = msgspec.structs.replace(RECORDS[4], samples_us=samples, reason=reason)
    records = [*RECORDS, odd] * 3
    lines = b"".join(map(journal.encode, [RUN, *records]))
    assert journal.digest(RUN, records) == hashlib.sha256(lines).hexdigest()


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
