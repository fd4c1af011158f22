"""The journal: what a sweep did, one JSON object a line, appended and never changed. A table is a
pure function of journals.

A sweep killed at any moment leaves a journal that opens; only the record being written is lost.
"""

import contextlib
import gc
import hashlib
import itertools
import lzma
import os
import re
import socket
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, final

import filelock
import msgspec

from gdntune import __version__, strict
from gdntune.device.arch import Card, Device
from gdntune.errors import JournalError, Locked, counted, listed, no_folder
from gdntune.files import write_whole
from gdntune.kernels.spec import Variant
from gdntune.problem import Contract, Problem, without_defaults
from gdntune.results.records import LAUNCH, PEER, TABLE, NOISY, Status, Purpose, Ended, Run, Build, Check, Trial, Cell, Record, made_by, timed, tried, power_capped, noisy, noise_notes, latest
from gdntune.results.workload import Load

SCHEMA = "gdntune.journal/1"
FILE = "journal.jsonl"
LOCK = ".lock"
HOLDER = "holder.json"
















_decoder: msgspec.json.Decoder[Run | Build | Check | Trial | Cell] = msgspec.json.Decoder(
    Run | Build | Check | Trial | Cell
)


_CONTENT = "content of the config"
# How a user asks for what must be equal, by how its name begins.
_ASKED = {
    "config": "--part, or another config",
    "rounds": "search.final_rounds of the config",
    "device": "--device, --index, or another machine",
    "timer": "--timer, or policy.timer of the config",
    "l2": "--l2, or policy.l2 of the config",
    TABLE: "--table, or the table in use",
    LAUNCH: "--dependent-launch, or the policy's own",
    PEER: "--peers, or another version of it",
    _CONTENT: "it was edited",
    "code of ": "it was edited",
}
_ACCEPTED = f"expected a sweep's folder, its {FILE}, or that as .xz"
# How a record's line begins: a file without one is something else, not a damaged journal.
_LINE = re.compile(rb'(?m)^{"kind" ?:')
# Samples that are finer than a nanosecond, as JSON has them: those read from a journal are not, and
# to round them anew would be most of what its digest takes.
_encoder = msgspec.json.Encoder()
# Records whose lines are made at once for a digest: some megabytes.
_LINES = 4096
_SAMPLES, _FINER = b'"samples_us":[', re.compile(rb"\.\d{4}|e-")
# What differs as well wherever something else does, by how its name begins: no news.
_FOLLOWS = {
    "command": ("",),
    "config": (_CONTENT,),
    "rounds": (_CONTENT,),
    "device": ("code of ", "timer"),
}


@final
class Journal:
    """An open journal: `run` (its header), `records` (what it holds, appended ones included),
    `path`.

    Made by `Journal.open`, closed by `close` or as a context manager. The folder is locked until
    then, or until the process ends, however it does; its children do not hold the lock. What takes
    long to prepare makes it in two steps: `claim`, which refuses what `open` would refuse, and
    `begin`.
    """

    def __init__(self, path: Path, run: Run, lock: filelock.BaseFileLock) -> None:
        self.path = path
        self.run = run
        self.records: list[Record] = []
        self.fresh = True
        self._lock = lock
        self._descriptor = -1
        self._size = 0
        self._broken = f"{path}: the journal was not begun"
        # Of its folder, while it is claimed alone.
        self._place = os.stat(path.parent)

    @classmethod
    def open(cls, folder: str | os.PathLike[str], run: Run) -> "Journal":
        """Resumes the journal in `folder`, or creates folder and journal with `run` as the header.

        A torn last line is cut off. The header that stands in the file stays; `run` must agree with
        it in config, device, kernels, policy and software. Raises Locked where another process has
        the folder open, and JournalError.
        """
        journal = cls.claim(folder, run)
        try:
            journal.begin(run)
        except BaseException:
            journal.close()
            raise
        return journal

    @classmethod
    def claim(cls, folder: str | os.PathLike[str], run: Run) -> "Journal":
        """Locks `folder`, which is made where it is not there, and reads its journal, which stays
        as it is until `begin`.

        run: the header as far as it is known; of its `policy`, what is not known yet may be left
            out. `fresh` says whether there was none.
        """
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = _acquire(folder)
        except OSError as e:
            why = no_folder(folder) or _why(e)
            raise JournalError(
                f"{folder}: cannot be written: {why}; choose a folder on a writable disk"
            ) from e
        journal = cls(folder / FILE, run, lock)
        try:
            journal._read(run)
        except BaseException:
            journal.close()
            raise
        return journal

    def _read(self, run: Run) -> None:
        try:
            # For writing too, so that a file that cannot be written is refused here.
            with self.path.open("r+b") as file:
                data = file.read()
        except FileNotFoundError:
            return
        except OSError as e:
            raise JournalError(f"{self.path}: {_why(e)}; choose another folder (--out)") from e
        whole = _whole(data, self.path)
        self._size = len(whole)
        if whole:
            self.fresh = False
            self.run, self.records = _parse(whole, self.path)
            self._agree(run)

    def _agree(self, run: Run) -> None:
        if differs := "; ".join(_differences(self.run, run)):
            raise JournalError(
                f"{self.path}: of another {made_by(self.run)}: {differs}. Give this one a folder of"
                " its own (--out), or ask for what the journal was started with:"
                f" {self.run.command or self.run.config} ({self.run.started})"
            )

    def begin(self, run: Run) -> None:
        """Opens a claimed journal for writing. run: the whole header, which a fresh one gets."""
        self.require_place()
        if not self.fresh:
            self._agree(run)
        try:
            self._descriptor = os.open(
                self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
            )
            # A torn last line, cut off only now: a claim must not change the file.
            if os.fstat(self._descriptor).st_size > self._size:
                os.ftruncate(self._descriptor, self._size)
                os.fsync(self._descriptor)
            self._broken = ""
            if self.fresh:
                self.run = self._write((run,))[0]
                _sync_folder(self.path.parent)
        except OSError as e:
            raise JournalError(f"{self.path}: {_why(e)}") from e

    def append(self, record: Record) -> None:
        """Writes one record and waits until it is on the disk. A failed write leaves the file as it
        was: JournalError.
        """
        self.extend((record,))

    def extend(self, records: Iterable[Record]) -> None:
        """Writes records together, all or none, and waits once: a cell has a hundred, and a disk
        takes milliseconds to be sure.
        """
        # As read back, rounded: a table derived now is the one derived from the file.
        self.records.extend(self._write(records))

    def _write(self, records: Iterable[Any]) -> list[Any]:
        """The records as they read from the file."""
        if self._broken:
            raise JournalError(self._broken)
        lines = [encode(record) for record in records]
        try:
            # Read before it is written: JSON has no NaN, and such a line would spoil the journal.
            stored = [_decoder.decode(line) for line in lines]
        except msgspec.ValidationError as e:
            raise JournalError(
                f"{self.path}: a record that could not be read again (not a finite number?): {e}"
            ) from e
        # One write for all: a kill between two would leave half a cell.
        data = b"".join(lines)
        if not data:
            return []
        self.require_place()
        try:
            rest = memoryview(data)
            while rest:
                # One write may take a part only, on a disk that is nearly full.
                rest = rest[os.write(self._descriptor, rest) :]
            os.fsync(self._descriptor)
        except BaseException as e:
            self._restore()
            if isinstance(e, OSError):
                raise JournalError(
                    f"{self.path}: a record could not be written: {_why(e)}; the journal holds all"
                    f" {len(self.records)} before it: free some space and start the same sweep"
                    " again, and it goes on there"
                ) from e
            raise
        self._size += len(data)
        return stored

    def require_place(self) -> None:
        """JournalError where its folder, or what was begun in it, was deleted or moved: what is
        written there would be gone with the process, and work in between is for nothing.
        """
        if self._broken and self._descriptor >= 0:
            raise JournalError(self._broken)
        begun = self._descriptor >= 0
        path = self.path if begun else self.path.parent
        # By inode: another file may stand at the path by now.
        place = os.fstat(self._descriptor) if begun else self._place
        try:
            there = os.path.samestat(os.stat(path), place)
        except OSError:
            there = False
        if not there:
            lost = f"; the records since then are lost ({len(self.records)} were there)"
            self._broken = (
                f"{path}: the {'journal' if begun else 'folder'} was deleted or moved while"
                f" {'it was written' if begun else 'objects were compiled'}{lost if begun else ''}."
                " Start the same command again, and leave its folder alone while it runs"
            )
            raise JournalError(self._broken)

    def _restore(self) -> None:
        try:
            os.ftruncate(self._descriptor, self._size)
            os.fsync(self._descriptor)
        except OSError as e:
            # Another append would put a whole line behind half a one; the next open cuts the half
            # off.
            self._broken = (
                f"{self.path}: closed for writing, since its end could not be restored: {_why(e)};"
                " open it again"
            )

    def close(self) -> None:
        """Closes the file and releases the lock. May be called twice."""
        self._broken = f"{self.path}: the journal was closed"
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._lock.is_locked:
            _release(self.path.parent, self._lock)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without the collector of cycles meanwhile. Records hold none, and to look through 150,000 of
    them again and again takes half of the time of reading. Also a decorator.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@uncollected()
def read(path: str | os.PathLike[str]) -> tuple[Run, list[Record]]:
    """Header and records of a journal, given its file or folder; takes no lock, and leaves out a
    torn last line.

    A file that ends in .xz is read as what `xz` made of a journal: that is how published ones are
    kept.
    """
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    try:
        data = path.read_bytes()
        data = lzma.decompress(data) if path.suffix == ".xz" else data
    except lzma.LZMAError as e:
        raise JournalError(
            f"{path}: not a whole xz file ({e}); fetch it again, or pass the journal itself"
        ) from e
    except OSError as e:
        raise JournalError(f"{path}: {_why(e)}; {_ACCEPTED}") from e
    return _parse(_whole(data, path), path)


















def encode(record: Any) -> bytes:
    """The line of a record."""
    try:
        line = _encoded(record)
        if isinstance(record, Trial) and _FINER.search(line, line.index(_SAMPLES)):
            rounded = [round(x, 3) for x in record.samples_us]
            line = _encoded(msgspec.structs.replace(record, samples_us=rounded))
        return line + b"\n"
    # A compiler's output and a command line need not be text.
    except UnicodeEncodeError:
        fields = msgspec.structs.asdict(record).items()
        texts = {
            name: v.encode("utf-8", "replace").decode() for name, v in fields if isinstance(v, str)
        }
        return _encoded(msgspec.structs.replace(record, **texts)) + b"\n"


def _encoded(record: Any) -> bytes:
    return without_defaults(msgspec.json.encode(record))


def digest(run: Run, records: Iterable[Record]) -> str:
    """The SHA-256 of the journal: of its file, where this version wrote it."""
    sha = hashlib.sha256(encode(run))
    records = list(records)
    # Some at a time: all lines of a long journal at once would be a second copy of its file.
    for first in range(0, len(records), _LINES):
        sha.update(_lines(records[first : first + _LINES]))
    return sha.hexdigest()


def _lines(records: list[Record]) -> bytes:
    """`encode` of each, joined. In one call where no sample is finer than a nanosecond and all text
    is text, which takes half the time.
    """
    import numpy as np

    samples = itertools.chain.from_iterable(r.samples_us for r in records if isinstance(r, Trial))
    us = np.fromiter(samples, np.float64)
    # The double of a number of whole nanoseconds has no more than three decimals as text.
    if (np.rint(us * 1e3) / 1e3 == us).all():
        with contextlib.suppress(UnicodeEncodeError):
            return without_defaults(_encoder.encode_lines(records))
    return b"".join(map(encode, records))


def now() -> str:
    """The time of day as `started` wants it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _parse(data: bytes, path: Path) -> tuple[Run, list[Record]]:
    if not data:
        raise JournalError(f"{path}: holds no whole line; start the sweep again")
    try:
        records: list[Any] = _decoder.decode_lines(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        records = []
    # It passes over lines that are empty, and does not say which one is wrong.
    if len(records) != data.count(b"\n"):
        return _parse_lines(data, path)
    kinds = list(map(type, records))
    if kinds[0] is not Run or kinds.count(Run) > 1:
        return _parse_lines(data, path)
    return records[0], records[1:]


def _parse_lines(data: bytes, path: Path) -> tuple[Run, list[Record]]:
    """The same line by line, which takes longer and can say what is wrong with one."""
    records: list[Any] = []
    for number, line in enumerate(data[:-1].split(b"\n"), 1):
        try:
            records.append(_decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            if number == 1:
                _refuse_others(data, path)
                # Only the header tells the schema; a later line of a newer one is told by its kind.
                strict.refuse_newer(line, SCHEMA, str(path), JournalError)
            newer = strict.newer_writer(data)
            _refuse_unknown_kind(line, number, path, newer)
            try:
                strict.refuse_odd_json(line, f"{path}: line {number}", JournalError)
                strict.decode(
                    line, Run | Build | Check | Trial | Cell, f"{path}: line {number}", JournalError
                )
            except JournalError as e:
                cut = (
                    ", or cut this line out and what it recorded is done again"
                    if number > 1
                    else ""
                )
                # A line that a newer version can read is none to cut out.
                raise JournalError(f"{e}; {newer or f'restore the file{cut}'}") from None
        # Two journals joined by hand, or one whose head was cut off.
        if isinstance(records[-1], Run) != (number == 1):
            raise JournalError(
                f"{path}: line {number}: a run's header must be the first line and no other"
            )
    return records[0], records[1:]


def _refuse_unknown_kind(line: bytes, number: int, path: Path, newer: str) -> None:
    """JournalError for a record that a newer version may write: to cut it out would lose it.

    newer: what to do where the header says that one wrote the journal.
    """
    found = re.match(rb'{"kind" ?: ?"([^"]*)"', line)
    kinds = [k.__struct_config__.tag for k in (Run, Build, Check, Trial, Cell)]
    if found and (kind := found[1].decode(errors="replace")) not in kinds:
        remedy = newer or (
            "a newer gdntune wrote it, so read the journal with that version or a later one (pip"
            " install -U gdntune); if the line is damaged, restore the file"
        )
        raise JournalError(
            f"{path}: line {number}: a record of kind {strict.short(kind)}, which gdntune"
            f" {__version__} does not know (expected one of {listed(kinds)}): {remedy}"
        )


def _whole(data: bytes, path: Path) -> bytes:
    """The whole lines; JournalError where there are none and this is no journal's begin either."""
    whole = data[: data.rfind(b"\n") + 1]
    if not whole:
        _refuse_others(data, path)
    return whole


def _refuse_others(data: bytes, path: Path) -> None:
    """JournalError for a file of which no line begins as a record: to cut out lines, or to go on in
    it, would destroy it.
    """
    if not _LINE.search(data) and not b'{"kind":"run"'.startswith(data):
        begins = strict.short(data[:200].partition(b"\n")[0].decode(errors="replace"))
        raise JournalError(
            f"{path} is no journal: it begins with {begins}, and a journal with its run's header;"
            f" {_ACCEPTED}"
        )


def _identity(run: Run) -> dict[str, str]:
    """What must be equal for samples of two processes to stand in one journal, by the name that a
    user knows it by.
    """
    # Without its peak: a measured one differs from run to run.
    d = run.device
    return {
        "command": f"gdntune {made_by(run)}",
        "config": run.config,
        **({} if run.rounds is msgspec.UNSET else {"rounds": str(run.rounds)}),
        _CONTENT: f"sha256 {run.config_sha256[:16]}",
        "device": (
            f"{d.name}, {d.arch}, {d.sm_count} SMs, {d.l2_bytes} bytes of L2, {d.memory_bytes} of"
            " memory"
        ),
        **run.policy,
        **{f"code of {name}": code for name, code in run.kernels.items()},
        # Of gdntune itself the kernels' code counts, so that a sweep outlives an upgrade.
        **{name: version for name, version in run.software.items() if name != "gdntune"},
    }


def _differences(there: Run, here: Run) -> Iterator[str]:
    """What keeps the samples of two runs apart, each with how a user asks for it; `there` is the
    journal's header.
    """
    old, new = _identity(there), _identity(here)
    # Older journals have no rounds, and a policy may be known later.
    names = [
        n
        for n in old | new
        if old.get(n) != new.get(n)
        and (n not in ("rounds", "timer", "l2") or n in old.keys() & new)
    ]
    for name in names:
        if not any(name.startswith(_FOLLOWS.get(other, ())) for other in names if other != name):
            how = next((asked for start, asked in _ASKED.items() if name.startswith(start)), "")
            if name == "rounds" and made_by(here) == "bench":
                how = f"--rounds, or {how}"
            yield (
                f"{name}: {old.get(name, 'none')} in the journal, {new.get(name, 'none')}"
                f" now{how and f' ({how})'}"
            )


def require_same(path: Path, there: Run, here: Run, records: Iterable[Record]) -> list[str]:
    """JournalError where samples of `there`, the header of the journal at `path`, cannot stand
    beside those of `here`: another config, policy, model of device, table or peer, or other code of
    a kernel that has samples there. What else differs, in words: other software, another card.
    """
    used = {r.variant.kernel for r in records if isinstance(r, Trial)}

    def alike(run: Run) -> Run:
        return msgspec.structs.replace(
            run,
            kernels={name: code for name, code in run.kernels.items() if name in used},
            software={n: v for n, v in run.software.items() if n.startswith((TABLE, LAUNCH, PEER))},
        )

    if differs := "; ".join(_differences(alike(there), alike(here))):
        raise JournalError(
            f"{path}: of another {made_by(there)}: {differs}. Expected a journal of this one:"
            f" {there.command or there.config} ({there.started})"
        )
    names = sorted(there.software.keys() & here.software.keys() - {"gdntune"})
    return [
        f"{path} is of {name} {there.software[name]}, this is {here.software[name]}"
        for name in names
        if there.software[name] != here.software[name]
    ]


class _Holder(msgspec.Struct, frozen=True):
    pid: int
    host: str
    since: str


def _acquire(folder: Path) -> filelock.BaseFileLock:
    # The system's lock, released by the end of the process, however it comes: a lock file of our
    # own would outlive a kill.
    lock = filelock.FileLock(folder / LOCK, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except filelock.Timeout:
        try:
            h = msgspec.json.decode((folder / HOLDER).read_bytes(), type=_Holder)
            holder = f"process {h.pid} on {h.host}, since {h.since}"
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            # It has not said yet who it is.
            holder = "another process"
        raise Locked(
            f"{folder}: in use by {holder}; wait for it, end it, or choose another folder"
        ) from None
    try:
        mine = _Holder(os.getpid(), socket.gethostname(), now())
        write_whole(folder / HOLDER, msgspec.json.encode(mine))
    except BaseException:
        lock.release()
        raise
    return lock


def _release(folder: Path, lock: filelock.BaseFileLock) -> None:
    # Before the lock is released: afterwards the file may be the next holder's.
    (folder / HOLDER).unlink(missing_ok=True)
    lock.release()


def _sync_folder(folder: Path) -> None:
    """Puts a new file's name on the disk, where the system can (Windows cannot)."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _why(e: OSError) -> str:
    return e.strerror or str(e)
