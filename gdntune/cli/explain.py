"""`gdntune explain`: which variant a call gets, and why."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from gdntune.cli.common import (
    AsJson,
    Index,
    Program,
    print_json,
    refusing,
)
from gdntune.errors import UnsupportedProblem

explaining = Program()

# of drafts, where nothing else is said
ACCEPT_RATE, LAYERS = 0.7, 36


@explaining.command()
@refusing
def explain(
    work_units: Annotated[int | None, typer.Option(help="B*HV; instead of --B and --HV.")] = None,
    B: Annotated[int | None, typer.Option("--B", help="Batch size.")] = None,
    HV: Annotated[int | None, typer.Option("--HV", help="Value heads.")] = None,
    op: Annotated[
        Literal["gdn_decode", "kda_decode", "verify"],
        typer.Option(
            help="What is computed; verify: what drafts are expected to cost in each way,"
            " KDA's with --gate softplus or lower_bound."
        ),
    ] = "gdn_decode",
    tokens: Annotated[int, typer.Option(help="T, tokens a request and call.")] = 1,
    accept_rate: Annotated[
        float | None,
        typer.Option(
            help="verify: chance that a draft is accepted if the one before was.",
            show_default=f"{ACCEPT_RATE}",
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(help="verify: layers that one commit serves.", show_default=f"{LAYERS}"),
    ] = None,
    K: Annotated[int, typer.Option("--K", help="Key head size.")] = 128,
    V: Annotated[int, typer.Option("--V", help="Value head size.")] = 128,
    layout: Annotated[
        Literal["k_last", "v_last"],
        typer.Option(help="States as slots x HV x V x K, or slots x HV x K x V."),
    ] = "k_last",
    state_dtype: Annotated[
        Literal["bf16", "fp16", "fp32"], typer.Option(help="The state's dtype.")
    ] = "bf16",
    input_dtype: Annotated[
        Literal["bf16", "fp16", "fp32"], typer.Option(help="The dtype of q, k, v and the output.")
    ] = "bf16",
    gate: Annotated[
        Literal["raw", "log", "softplus", "lower_bound"] | None,
        typer.Option(
            help="How the decay is given; by default raw (GDN) or softplus (KDA); log: as the"
            " decay's logarithm."
        ),
    ] = None,
    beta: Annotated[
        Literal["logit", "given"],
        typer.Option(help="logit: a sigmoid is applied to beta; given: it is not."),
    ] = "logit",
    mode: Annotated[
        Literal["update", "frozen"], typer.Option(help="Whether the final state is written.")
    ] = "update",
    intermediate: Annotated[
        Literal["none", "dense", "indexed", "slots"],
        typer.Option(help="Where the state after each token goes."),
    ] = "none",
    accepted: Annotated[
        bool, typer.Option("--accepted", help="With slots: num_accepted_tokens is given.")
    ] = False,
    pool: Annotated[
        bool, typer.Option(help="Whether the state is a pool of slots named by indices.")
    ] = True,
    ragged: Annotated[bool, typer.Option("--ragged", help="Packed rows with cu_seqlens.")] = False,
    norm: Annotated[
        Literal["none", "silu", "sigmoid"],
        typer.Option(help="The gated RMSNorm behind, in the same launch."),
    ] = "none",
    conv: Annotated[
        Literal["none", "identity", "silu"],
        typer.Option(help="The convolution ahead, of width 4, in the same launch."),
    ] = "none",
    table_path: Annotated[
        Path | None, typer.Option("--table", help="Ask this table instead of the one in use.")
    ] = None,
    dependent_launch: Annotated[
        bool,
        typer.Option(
            "--dependent-launch/--no-dependent-launch",
            help="Whether the call is made with dependent_launch=True.",
        ),
    ] = False,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="The device whose table is asked.")
    ] = "auto",
    index: Index = 0,
    as_json: AsJson = False,
) -> None:
    """Say which variant the runtime calls for a contract at some work units, and why."""
    from gdntune.problem import GATES, Contract, check_contract
    from gdntune.runtime.explain import explanation

    if work_units is None:
        if B is None or HV is None:
            raise UnsupportedProblem(
                "work units are not given: expected --work-units N, or --B and --HV"
            )
        work_units = B * HV
    elif B is not None or HV is not None:
        raise UnsupportedProblem(
            "--work-units with --B or --HV: give one or the other, work units are B*HV"
        )
    if index and (table_path or device == "cpu"):
        beside = f"--table {table_path}" if table_path else "--device cpu"
        raise UnsupportedProblem(f"--index {index} with {beside}: leave --index out, it asks a GPU")
    if dependent_launch and op == "verify":
        raise UnsupportedProblem(
            "--dependent-launch with --op verify: leave it out, the ways are of calls without it"
        )
    if op != "verify" and (accept_rate is not None or layers is not None):
        given = "--layers" if accept_rate is None else "--accept-rate"
        raise UnsupportedProblem(f"{given} with --op {op}: expected --op verify, or leave it out")
    kind: Literal["gdn_decode", "kda_decode"] = "gdn_decode"
    if op != "verify":
        kind = op
    elif gate is not None and gate not in GATES[kind]:
        kind = "kda_decode"
    contract = Contract(
        op=kind,
        tokens=tokens,
        K=K,
        V=V,
        layout=layout,
        state_dtype=state_dtype,
        input_dtype=input_dtype,
        gate=gate or ("raw" if kind == "gdn_decode" else "softplus"),
        beta=beta,
        mode=mode,
        intermediate=intermediate,
        accepted=accepted,
        pool=pool,
        ragged=ragged,
        norm=norm,
        conv=conv,
    )
    check_contract(contract)
    if op == "verify":
        _explain_verify(
            contract,
            work_units,
            ACCEPT_RATE if accept_rate is None else accept_rate,
            LAYERS if layers is None else layers,
            table_path,
            device,
            index,
            as_json,
        )
        return
    said = explanation(contract, work_units, table_path, device, index, dependent_launch)
    if as_json:
        print_json(said)
        return
    typer.echo(f"{said['contract']}, {work_units} work units, on {said['device']}")
    typer.echo(
        f"  table:   {said['table'] or 'none'}{said['origin'] and ' (' + said['origin'] + ')'}"
    )
    typer.echo(f"  variant: {said['variant'] or 'none'}")
    typer.echo(f"  why:     {said['reason']}")
    if other := said["otherwise"]:
        how = "without" if dependent_launch else "with"
        typer.echo(f"  {how} dependent launch: {other['variant']}: {other['reason']}")
    for warning in said["warnings"]:
        typer.echo(f"  note:    {warning}")


def _explain_verify(
    contract: Any,
    work_units: int,
    accept_rate: float,
    layers: int,
    table_path: Path | None,
    device: Literal["auto", "cpu", "cuda"],
    index: int,
    as_json: bool,
) -> None:
    from gdntune.results import drafts
    from gdntune.results.records import policy_words
    from gdntune.results.table import load
    from gdntune.runtime.explain import in_use

    table = load(table_path) if table_path else in_use(contract.op, device, index)
    if table is None:
        raise UnsupportedProblem(
            "no table for this device: nothing was measured; sweep, or name one by --table"
        )
    found = drafts.ways(table, contract, work_units, accept_rate, layers)
    if as_json:
        print_json(found)
        return
    typer.echo(
        f"T={contract.tokens}, {work_units} work units a layer, {layers} layers, each draft"
        f" accepted with {accept_rate:g}, on {table.device.name}; microseconds a layer"
    )
    policies = dict.fromkeys(policy_words(call.policy) for way in found for call in way.calls)
    for way in found:
        typer.echo(
            f"  {way.name}: {way.accepted_us:.2f} an accepted token, {way.step_us:.2f} a step"
        )
        for call in way.calls:
            under = f", under {policy_words(call.policy)}" if len(policies) > 1 else ""
            typer.echo(f"    {call.time_us:.2f}  {call.contract}: {call.how}{under}")
    if len(policies) > 1:
        typer.echo("  note: not all were timed under one policy: compare ways of one alone")
    for name, config in drafts.missing(contract.op, found):
        typer.echo(
            f"  {name}: the table has no cells of it; run `gdntune sweep {config}`, then `gdntune"
            " table merge` of its table and this one"
        )
