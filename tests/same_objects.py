"""Compares what two revisions compile to: every object that the shipped tables and the defaults can
choose.

    python tests/same_objects.py OLD [NEW] [--arch sm_90a] [--jobs 2] [--keep DIR] [--record]

OLD and NEW are git revisions, or `.` for the working tree (NEW's default). Objects are made without
a GPU, in processes of their own, and the exported objects compared byte for byte: the GPU's machine
code, the launch and the argument checks. PTX shows where two differ; ptxas may assemble other PTX to
the same object, which is counted apart. Exits with 1 where any object differs.
--keep: a folder for the PTX; what it holds of a kernel's fingerprint is not compiled again, so that
a run that was stopped goes on. --record: where
nothing differs, a table that was measured with OLD's kernels is no longer called stale. --op: of one
op alone, and what is recorded holds for its tables alone. --without: a knob; objects that have it set
are left out, and what is recorded does not hold for tables that name one: those are swept again.
"""

import argparse
import difflib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
WORK_UNITS = tuple(2**i for i in range(14))


def choices() -> Iterator[tuple[str, Any, Any]]:
    """(kernel, contract, knobs) of every choice of the shipped tables and of the default rules.

    Contracts: those of the tables' rules and of the shipped configs. A contract that has no rule is
    served by the nearest one's variants, as at run time.
    """
    from gdntune import kernels
    from gdntune.errors import UnsupportedProblem
    from gdntune.results import table
    from gdntune.tuning import config

    contracts = {}
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        found = config.load(path)
        if found.device != "cpu":
            contracts.update(dict.fromkeys(found.all_contracts()))
    tables = [table.load(p) for p in sorted((ROOT / "tables").glob("nvidia-*/*.json"))]
    for t in tables:
        contracts.update(dict.fromkeys(rule.when for rule in t.rules))
    for contract in contracts:
        for t in tables:
            ranked = t.ranked(contract)
            for interval in ranked[0].intervals if ranked else ():
                variant = t.variant(interval.variant)
                if kernels.refuse(contract, variant) is None:
                    yield variant.kernel, contract, variant.knobs
            for kernel in (
                *kernels.serving(t.device, "decode"),
                *kernels.serving(t.device, "floor"),
            ):
                for work_units in WORK_UNITS:
                    try:
                        knobs = kernel.default(contract, work_units, t.device)
                    except UnsupportedProblem:
                        break
                    if kernel.fault(contract, knobs) is None:
                        yield kernel.name, contract, kernel.variant(knobs).knobs


def listed() -> list[dict[str, Any]]:
    """Each object once: kernel, facts, knobs; and the knobs' values where nobody gives them."""
    import dataclasses

    from gdntune import kernels

    found = {}
    for name, contract, knobs in choices():
        kernel = kernels.get(name)
        one = {
            "kernel": name,
            "module": kernel.compiler.split(":")[0],
            "op": contract.op,
            "facts": dict(kernel.facts(contract)),
            "knobs": dataclasses.asdict(kernel.setting(knobs)),
            "defaults": {
                f.name: f.default
                for f in dataclasses.fields(kernel.knobs)
                if f.default is not dataclasses.MISSING
            },
        }
        found[json.dumps(one, sort_keys=True)] = one
    return list(found.values())


def name_of(one: dict[str, Any]) -> str:
    """An object's name, the same for two revisions of which one has more knobs."""
    knobs = {k: v for k, v in one["knobs"].items() if one["defaults"].get(k, ...) != v}
    text = json.dumps([one["kernel"], one["facts"], knobs], sort_keys=True)
    return f"{one['kernel']}-{hashlib.sha256(text.encode()).hexdigest()[:20]}"


def compile_all(folder: Path) -> None:
    """Compiles the objects on the standard input, with the package on PYTHONPATH: PTX and hash of
    the object into the folder. What the package has no knob for is `lacking`.
    """
    import dataclasses
    import importlib

    from gdntune import kernels

    target = Compiled(folder, kernels.fingerprints("cuda"))
    for one in json.load(sys.stdin):
        kernel = kernels.KERNELS.get(one["kernel"])
        fields = {f.name for f in dataclasses.fields(kernel.knobs)} if kernel else set()
        knobs = {
            k: v for k, v in one["knobs"].items() if k in fields or one["defaults"].get(k, ...) != v
        }
        if not set(knobs) <= fields or not kernel:
            result, ptx = {"lacking": True}, ""
        else:
            compiler = importlib.import_module(one["module"]).compile
            with tempfile.TemporaryDirectory() as temporary:
                try:
                    compiled = compiler(
                        one["facts"],
                        dataclasses.asdict(kernel.setting(knobs)),
                        options=f"--keep-ptx --dump-dir {temporary}",
                        prefix="kernel",
                    )
                except Exception as e:  # noqa: BLE001  that it does not compile is compared too
                    result, ptx = {"error": f"{type(e).__name__}: {e}"[-500:]}, ""
                else:
                    ptx = (
                        compiled.__ptx__
                        if isinstance(compiled.__ptx__, str)
                        else compiled.__ptx__.decode()
                    )
                    path = Path(temporary) / "object.o"
                    compiled.export_to_c(str(path), function_name="kernel")
                    result = {"object": hashlib.sha256(path.read_bytes()).hexdigest()}
        target.path(one, "ptx").write_text(ptx)
        target.path(one, "json").write_text(json.dumps(result))


def tree(revision: str, folder: Path) -> Path:
    """A checkout of a revision's package; the working tree for `.`."""
    if revision == ".":
        return ROOT
    target = folder / "tree"
    if not target.exists():
        target.mkdir(parents=True)
        packed = subprocess.run(
            ["git", "archive", revision, "gdntune"], cwd=ROOT, check=True, capture_output=True
        )
        subprocess.run(["tar", "-x", "-C", str(target)], input=packed.stdout, check=True)
    return target


def fingerprints(path: Path) -> dict[str, str]:
    """The fingerprints of a tree's CUDA kernels."""
    script = (
        "import json; from gdntune import kernels; print(json.dumps(kernels.fingerprints('cuda')))"
    )
    env = {**os.environ, "PYTHONPATH": str(path)}
    found = subprocess.run(
        [sys.executable, "-c", script],
        env=env,
        cwd=path,
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(found.stdout)


class Compiled(NamedTuple):
    """What a tree's kernels compile to, below a folder. Files are named by the kernel's fingerprint,
    so that trees with the same kernel share them, and a run that was stopped goes on.
    """

    folder: Path
    prints: dict[str, str]

    def path(self, one: dict[str, Any], suffix: str) -> Path:
        return self.folder / f"{name_of(one)}-{self.prints.get(one['kernel'], 'none')}.{suffix}"

    def result(self, one: dict[str, Any]) -> dict[str, Any]:
        """What compiling an object gave."""
        return json.loads(self.path(one, "json").read_text())

    def ptx(self, one: dict[str, Any]) -> str:
        return self.path(one, "ptx").read_text()


def compiled(path: Path, objects: list[dict], keep: Path, arch: str, jobs: int) -> Compiled:
    """Compiles what the folder does not hold yet of a tree's objects."""
    found = Compiled(keep / arch, fingerprints(path))
    found.folder.mkdir(parents=True, exist_ok=True)
    missing = [o for o in objects if not found.path(o, "json").exists()]
    env = {**os.environ, "PYTHONPATH": str(path), "CUTE_DSL_ARCH": arch, "CUDA_VISIBLE_DEVICES": ""}
    running = []
    for shard in range(jobs if missing else 0):
        child = subprocess.Popen(
            [sys.executable, __file__, "--compile", str(found.folder)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd=path,
        )
        child.stdin.write(json.dumps(missing[shard::jobs]).encode())
        child.stdin.close()
        running.append(child)
    if any(code for code in [child.wait() for child in running]):
        raise SystemExit(f"compiling {path} failed: see above")
    return found


def main() -> int:
    """Compares and prints; 0 where all objects are the same."""
    if sys.argv[1:2] == ["--compile"]:
        compile_all(Path(sys.argv[2]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("old")
    parser.add_argument("new", nargs="?", default=".")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--only", default="", help="a kernel's name: the others are left alone")
    parser.add_argument(
        "--op", default="", help="gdn_decode or kda_decode: the other is left alone"
    )
    parser.add_argument(
        "--without", default="", help="a knob: objects that have it set are left out"
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="where nothing differs, write gdntune/kernels/identical.json",
    )
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    objects = [o for o in listed() if options.only in ("", o["kernel"])]
    objects = [o for o in objects if options.op in ("", o["op"])]
    if options.without and not any(options.without in o["knobs"] for o in objects):
        parser.error(f"--without {options.without}: no object has such a knob")
    objects = [o for o in objects if not o["knobs"].get(options.without)]
    with tempfile.TemporaryDirectory() as temporary:
        keep = options.keep or Path(temporary)
        trees = [
            tree(r, Path(temporary) / str(i)) for i, r in enumerate((options.old, options.new))
        ]
        old = compiled(trees[0], objects, keep, options.arch, options.jobs)
        known = [o for o in objects if not old.result(o).get("lacking")]
        new = compiled(trees[1], known, keep, options.arch, options.jobs)
        lacking = len(objects) - len(known)
        print(
            f"{lacking} of {len(objects)} objects are of kernels or knobs that {options.old} lacks"
        )
        code = report(known, old, new)
        if options.record and not code:
            record(known, old, new, options)
        return code


def record(objects: list[dict], old: Compiled, new: Compiled, options: argparse.Namespace) -> None:
    """Adds what was compared to the package's list, in place of what it says of the same code."""
    counts = Counter(one["kernel"] for one in objects)
    was, now = old.prints, new.prints
    entries = [
        {
            "kernel": k,
            "measured": was[k],
            "code": now[k],
            "revision": options.old,
            "arch": options.arch,
            "objects": n,
            **{k: x for k in ("op", "without") if (x := getattr(options, k))},
        }
        for k, n in sorted(counts.items())
        if was[k] != now[k]
    ]
    path = ROOT / "gdntune/kernels/identical.json"
    keys = {_key(e) for e in entries}
    kept = [e for e in json.loads(path.read_text()) if _key(e) not in keys]
    path.write_text(json.dumps([*kept, *entries], indent=1) + "\n")
    print(
        f"recorded: {', '.join(e['kernel'] for e in entries) or 'nothing, the fingerprints are equal'}"
    )


def _key(entry: dict[str, Any]) -> tuple[str, ...]:
    return (
        entry["kernel"],
        entry["measured"],
        entry["code"],
        entry.get("op", ""),
        entry.get("without", ""),
    )


def report(objects: list[dict], old: Compiled, new: Compiled) -> int:
    """Prints counts and each difference."""
    counts: Counter[tuple[str, str]] = Counter()
    for one in objects:
        name = name_of(one)
        results = [side.result(one) for side in (old, new)]
        ptx = [side.ptx(one) for side in (old, new)]
        if "error" in results[0] or "error" in results[1]:
            verdict = "does not compile, as before" if results[0] == results[1] else "DIFFERENT"
        elif results[0] != results[1]:
            verdict = "DIFFERENT"
        else:
            verdict = "same" if ptx[0] == ptx[1] else "same, of other PTX"
        counts[one["kernel"], verdict] += 1
        if verdict == "DIFFERENT":
            knobs = {k: v for k, v in one["knobs"].items() if one["defaults"].get(k, ...) != v}
            lines = [
                x
                for x in difflib.unified_diff(*(p.splitlines() for p in ptx), n=0)
                if x[:1] in "+-"
            ]
            print(
                f"{name} {one['facts']} {knobs}: PTX {'equal' if ptx[0] == ptx[1] else f'differs in {len(lines)} lines'}"
            )
            print(
                "\n".join(
                    f"    {x}"
                    for x in [
                        *map(str, (r.get("error") for r in results if "error" in r)),
                        *lines[:6],
                    ]
                )
            )
    for (kernel, verdict), n in sorted(counts.items()):
        print(f"{kernel}: {n} {verdict}")
    return int(any(verdict == "DIFFERENT" for _, verdict in counts))


if __name__ == "__main__":
    raise SystemExit(main())
