"""gdntune/results/journal.py: whose a journal is. Another sweep's is refused, a second opener waits for none."""

import hashlib
import json
import os
import socket

import msgspec
import pytest
from journals import RECORDS, RUN, written

from gdntune.device.arch import target
from gdntune.errors import JournalError, Locked
from gdntune.results import journal
from gdntune.results.journal import Journal
from gdntune.results.records import made_by


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
