"""What is said of a GPU that is not here: what its objects take, and times that are expected of it,
each marked as such.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from gdntune import kernels, sol
from gdntune.device.occupancy import MULTIPROCESSORS, RESERVED_BYTES
from gdntune.objects.store import CUTE_DSL_VERSION
from gdntune.problem import Contract, Problem
from gdntune.report import words
from gdntune.report.document import Block, Bullets, Code, Document, Grid, Section, Text
from gdntune.report.words import MISSING, number
from gdntune.results.expect import Line, Model
from gdntune.results.published import Published, PublishedCell
from gdntune.tuning.resources import Range, Resource, range_of

MARK = "expected, not measured"
# Batches of the tables that stand beside nothing published.
BATCHES = (1, 4, 16, 64, 256, 512)
_AUTHORS = "flashinfer"


def expectations(
    model: Model,
    found: Sequence[Resource],
    failed: Sequence[str],
    publications: Sequence[Published],
    problems: Sequence[Problem],
    command: str,
) -> Document:
    """The page on a model's target.

    found: what its objects take; failed: names of those that do not compile. problems: the
        configs', of which those that write the final state have tables of expected times, with the
        most heads. command: what makes this page.
    """
    target = model.target
    summary = Section(
        "",
        (
            Text(
                f"What can be said of the {target.name} ({target.sm_count} SMs,"
                f" {target.peak_gb_s:.0f} GB/s by datasheet) without one: what the compiler says of"
                " every variant, and what a cost model expects, beside what others published."
            ),
            Bullets(_found(model, found, failed)),
            Text(
                "This page is written by a command, which compiles what is not compiled yet and"
                " needs no GPU:"
            ),
            Code(command),
        ),
    )
    sections = [summary, _occupancies(model, found), _model(model)]
    sections += [
        s for p in publications for s in (_beside(model, p), _back_test(model, p)) if s.blocks
    ]
    sections += [
        Section("Other contracts", tuple(_others(model, problems))),
        Section("Every variant", tuple(_every(found))),
    ]
    return Document(f"{target.name}: {MARK}", tuple(s for s in sections if s.blocks))


def _found(model: Model, found: Sequence[Resource], failed: Sequence[str]) -> tuple[str, ...]:
    """What the compiler says, and what the page is made of, a line each."""
    target = model.target
    worst = max(found, key=lambda r: r.registers, default=None)
    spilling = [r for r in found if r.spill_bytes]
    return (
        f"{len(found)} objects compiled for {target.arch} by nvidia-cutlass-dsl {CUTE_DSL_VERSION};"
        f" {len(failed) or 'none'} failed" + (f": {', '.join(failed)}." if failed else "."),
        (
            "No variant spills."
            if not spilling
            else f"Spills: {len(spilling)} of them, "
            + "; ".join(
                f"`{r.variant.id}` of {_contract(r)}, {r.spill_bytes} bytes a thread"
                for r in spilling
            )
            + "."
        ),
        (
            f"Registers: {worst.registers} a thread at most, `{worst.variant.id}` of"
            f" {_contract(worst)}."
            if worst
            else "Nothing to count."
        ),
        (
            f"Times are of a model fed by journals of the {model.source.name}: every column of them"
            f" is headed `{MARK}`. The journals: {', '.join(model.journals)}. Nothing of ours on"
            f" this page was run on the {target.name}."
        ),
    )


def _groups(found: Sequence[Resource]) -> dict[str, list[Resource]]:
    """Objects by kernel and contract, T apart from where it is compiled apart, as a heading says
    it.
    """
    groups: dict[Any, list[Resource]] = {}
    for r in found:
        # Grouped by what is compiled, not by contract: a kernel that serves every T has one row for
        # all.
        facts = kernels.get(r.variant.kernel).facts(r.contract)
        groups.setdefault((r.variant.kernel, tuple(sorted(facts.items(), key=str))), []).append(r)
    named: dict[str, list[Resource]] = {}
    for group in groups.values():
        name = f"{_contract(max(group, key=lambda r: len(r.tokens)))}, {group[0].variant.kernel}"
        named.setdefault(name, []).extend(group)
    return named


def _contract(r: Resource) -> str:
    c = r.contract
    tokens = f"T={words.ranges(r.tokens)}"
    if r.role == "floor":
        return f"floor of {c.state_dtype} {c.mode}" + (
            "" if c.intermediate == "none" else f" {c.intermediate}"
        )
    rest = words.contract_rest(c)
    return f"{words.contract_form(c)} {tokens}" + (f" {rest}" if rest else "")


def _occupancies(model: Model, found: Sequence[Resource]) -> Section:
    sm = MULTIPROCESSORS[model.target.arch]
    rows = []
    for name, group in _groups(found).items():
        registers = range_of(r.registers for r in group)
        rows.append(
            (
                name,
                str(len(group)),
                f"{registers.least:.0f} {registers.median:.0f} {registers.most:.0f}",
                str(max(r.spill_bytes for r in group)),
                _ends(range_of(r.block.shared_bytes for r in group)),
                _ends(range_of(r.occupancy.blocks for r in group)),
                _ends(range_of(100 * r.occupancy.share for r in group)),
            )
        )
    return Section(
        "Registers, shared memory, occupancy",
        (
            Text(
                "Registers and spills (bytes of a thread's stack) are the compiler's, from the"
                " cubin; shared memory, in bytes a block, is what the launch asks for. Occupancy"
                " is theoretical: the blocks that an SM holds at once, and their share of the"
                f" warps it has room for. An SM of {model.target.arch} has {sm.registers}"
                " registers, a quarter of them for each quarter of its warps,"
                f" {sm.shared_bytes >> 10} KiB of shared memory, of which the system keeps"
                f" {RESERVED_BYTES >> 10} KiB a block, and room for {sm.threads} threads and"
                f" {sm.blocks} blocks (NVIDIA, CUDA C++ Programming Guide, Technical Specifications"
                " per Compute Capability)"
                + (
                    f"; an SM of {model.source.arch} has the same."
                    if MULTIPROCESSORS.get(model.source.arch) == sm
                    else "."
                )
            ),
            Grid(
                "Ranges over the variants of a contract; registers: least, median, most",
                ("contract, kernel", "n", "registers", "spill", "shared, B", "blocks", "occ. %"),
                tuple(rows),
            ),
        ),
    )


def _ends(r: Range) -> str:
    least, most = f"{r.least:.0f}", f"{r.most:.0f}"
    return least if least == most else f"{least}-{most}"


def _model(model: Model) -> Section:
    a, b = model.source, model.target
    sources = sorted({line.l2 for line in model.lines.values()})
    return Section(
        "The cost model",
        (
            Text(
                f"For w work units (B x HV) it takes the {a.name}'s best time t and its floor's"
                f" time f at w' = w x {a.sm_count}/{b.sm_count}, where each SM has the same load,"
                f" linear between the two nearest cells of the journals (L2: {', '.join(sources)})."
                f" An SM's share of the DRAM there is r = ({model.source_peak:.0f}/{a.sm_count}) /"
                f" ({model.target_peak:.0f}/{b.sm_count}) = {model.share:.3f} of what it is here."
                " Of the floor, f0 is what its smallest cell takes beyond its bytes at the peak."
                " Then `time = t - (1 - r)(f - f0)`: the floor's transfer shrinks by r, nothing"
                " else does. `most = t`: were the SMs to decide and not the DRAM."
            ),
            Bullets(
                (
                    (
                        f"It supposes that the {b.name} reaches the share of its peak that the"
                        f" {a.name} reaches, at equal clocks and equal latencies."
                    ),
                    (
                        "What a kernel takes beyond its floor, and what it takes to start, is"
                        " carried over unchanged. Arithmetic that the transfer hid there may show"
                        " here, so the truth may lie between `time` and `most`, and the more tokens"
                        " the higher."
                    ),
                    (
                        f"A larger L2 ({b.l2_bytes >> 20} MiB, not {a.l2_bytes >> 20}) and"
                        f" instructions that only {b.arch} has are not in it."
                    ),
                    (
                        "Small batches are the weakest: they wait for latencies, which were"
                        " measured on the other GPU alone."
                    ),
                )
            ),
        ),
    )


def _beside(model: Model, publication: Published) -> Section:
    blocks: list[Block] = []
    if model.target.name != publication.gpu:
        return Section("", ())
    for tokens, cells in _by_tokens(publication).items():
        line = model.line(cells[0].problem.contract, publication.l2)
        rows = [_row(model, line, cell) for cell in cells] if line else []
        if line and any(row[-1] != MISSING for row in rows):
            caption = (
                f"T={tokens}, {words.contract_form(line.contract)}; theirs {publication.l2}, ours"
                f" from {line.l2}"
            )
            headers = ("B", "theirs, us, published", f"ours, us, {MARK}", f"at most, {MARK}")
            blocks.append(Grid(caption, headers, tuple(rows)))
    if blocks:
        text = (
            f"Theirs: {publication.url}, on the {publication.gpu},"
            f" HV={publication.cells[0].problem.HV}, as printed; T=1 writes the final state, T of 2"
            " and more the state after each token. Ours are the model's, for the same contract but"
            " for the dtypes of A_log and dt_bias. A dash: no journal has a cell with that load."
            f" Theirs are timed {publication.l2}. Where a caption says that ours are from another"
            " policy, part of the difference is the policy's: under cold-dirty a call also waits"
            " for others' modified lines to leave L2."
        )
        blocks.insert(0, Text(text))
    return Section(f"Beside {publication.title}", tuple(blocks))


def _by_tokens(publication: Published) -> dict[int, list[PublishedCell]]:
    found: dict[int, list[PublishedCell]] = {}
    for cell in sorted(publication.cells):
        found.setdefault(cell.problem.contract.tokens, []).append(cell)
    return {t: sorted(cells, key=lambda c: c.problem.B) for t, cells in sorted(found.items())}


def _row(model: Model, line: Line, cell: PublishedCell) -> tuple[str, ...]:
    found = model.expected(line, cell.problem.work_units)
    theirs = "ERROR" if cell.time_us is None else number(cell.time_us)
    ours = (MISSING, MISSING) if found is None else (number(found.time_us), number(found.most_us))
    return (str(cell.problem.B), theirs, *ours)


def _back_test(model: Model, publication: Published) -> Section:
    """The model's word on the authors' own kernel, timed in the journals, against what they
    printed.
    """
    rows, ratios, policies, within = [], [], set(), 0
    for tokens, cells in (
        _by_tokens(publication).items() if model.target.name == publication.gpu else ()
    ):
        line = model.line(cells[0].problem.contract, publication.l2, _AUTHORS)
        for cell in cells if line else ():
            found = line and model.expected(line, cell.problem.work_units)
            if line and found and cell.time_us:
                ratios.append(found.time_us / cell.time_us)
                policies.add(line.l2)
                within += found.time_us <= cell.time_us <= found.most_us
                numbers = (
                    number(cell.time_us),
                    number(found.time_us),
                    number(found.most_us),
                    f"{ratios[-1]:.2f}",
                )
                rows.append((str(tokens), str(cell.problem.B), *numbers))
    if not rows:
        return Section("", ())
    headers = ("T", "B", "us, published", f"us, {MARK}", f"at most, {MARK}", "ratio")
    return Section(
        "How far the model can be trusted",
        (
            Text(
                f"FlashInfer's own kernels were timed on the {model.source.name} too, beside ours."
                f" The model, applied to their times there ({', '.join(sorted(policies))}), against"
                f" the times printed for the {publication.gpu} ({publication.l2}): expected over"
                f" published is {words.geometric_mean(ratios):.2f} in the geometric mean of"
                f" {len(ratios)} cells, {min(ratios):.2f} at least and {max(ratios):.2f} at most;"
                f" {within} of the published times lie between expected and at most. Where the"
                " ratio is below 1 the model was too hopeful of theirs, and may be as much so of"
                " ours. The versions of FlashInfer may differ."
            ),
            Grid("FlashInfer's kernel, expected and published", headers, tuple(rows), left=0),
        ),
    )


def _others(model: Model, problems: Sequence[Problem]) -> Iterator[Block]:
    """Expected times at the configs' contracts with the least, the middle and the largest T."""
    forms: dict[Contract, list[Problem]] = {}
    for p in problems:
        forms.setdefault(p.contract.replace(tokens=1), []).append(p)
    for form, group in forms.items():
        largest = max(group, key=lambda p: p.HV)
        H, HV = largest.H, largest.HV
        tokens = range_of(p.contract.tokens for p in group)
        contracts = [form.replace(tokens=int(t)) for t in dict.fromkeys(tokens)]
        lines = {c: line for c in contracts if (line := model.line(c, "cold-clean"))}
        rows = []
        for B in BATCHES if lines else ():
            row = [str(B)]
            for c, line in lines.items():
                found = model.expected(line, B * HV)
                if found is None:
                    row.append(MISSING)
                    continue
                share = sol.sol(
                    sol.bytes_moved(Problem(c, B, H, HV)), found.time_us, model.target_peak
                )
                row.append(
                    f"{number(found.time_us)} to {number(found.most_us)} ({100 * share:.0f}%)"
                )
            rows.append(tuple(row))
        if rows:
            policies = ", ".join(sorted({line.l2 for line in lines.values()}))
            caption = (
                f"{words.contract_form(form)}, HV={HV}: us, to at most, and the share of the DRAM's"
                f" peak; from {policies}"
            )
            yield Grid(caption, ("B", *(f"T={c.tokens}, {MARK}" for c in lines)), tuple(rows))


def _every(found: Sequence[Resource]) -> Iterator[Block]:
    yield Text(
        "An id names the knobs that differ from their defaults (`gdntune/kernels/*_config.py` says"
        " what each is); T of 2 to 8 share an object. What bounds the number of blocks: w warps, r"
        " registers, s shared memory, b the limit of blocks."
    )
    for name, group in _groups(found).items():
        rows = []
        for r in group:
            bound = {"warps": "w", "registers": "r", "shared memory": "s", "blocks": "b"}[
                r.occupancy.bound
            ]
            rows.append(
                (
                    r.variant.id.removeprefix(f"{r.variant.kernel}."),
                    str(r.registers),
                    str(r.spill_bytes),
                    str(r.block.shared_bytes),
                    f"{r.occupancy.blocks} {bound}",
                    f"{100 * r.occupancy.share:.0f}",
                )
            )
        yield Grid(name, ("variant", "regs", "spill", "shared", "blocks", "occ. %"), tuple(rows))
