"""GPUs by name, from their datasheets: what a table is chosen by where the GPU is not here."""

import difflib
import re

from gdntune.device.arch import Device, datasheet_gb_s
from gdntune.errors import UnknownName, listed

# name: arch, SMs, MiB of L2, GiB of memory.
GPUS: dict[str, tuple[str, int, int, int]] = {
    "NVIDIA A10": ("sm_86", 72, 6, 24),
    "NVIDIA A100-PCIE-40GB": ("sm_80", 108, 40, 40),
    "NVIDIA A100-SXM4-80GB": ("sm_80", 108, 40, 80),
    "NVIDIA L4": ("sm_89", 58, 48, 24),
    "NVIDIA L20": ("sm_89", 92, 96, 48),
    "NVIDIA L40S": ("sm_89", 142, 96, 48),
    "NVIDIA RTX 6000 Ada Generation": ("sm_89", 142, 96, 48),
    "NVIDIA GeForce RTX 4090": ("sm_89", 128, 72, 24),
    "NVIDIA H20": ("sm_90a", 78, 60, 96),
    "NVIDIA H100 PCIe": ("sm_90a", 114, 50, 80),
    "NVIDIA H100 NVL": ("sm_90a", 132, 50, 94),
    "NVIDIA H100 80GB HBM3": ("sm_90a", 132, 50, 80),
    "NVIDIA H800": ("sm_90a", 132, 50, 80),
    "NVIDIA H200": ("sm_90a", 132, 60, 141),
    "NVIDIA GH200 480GB": ("sm_90a", 132, 60, 96),
    "NVIDIA B200": ("sm_100a", 148, 126, 180),
    "NVIDIA B300 SXM6 AC": ("sm_103a", 148, 126, 268),
    "NVIDIA GeForce RTX 5090": ("sm_120a", 170, 96, 32),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": ("sm_120a", 188, 128, 96),
    "NVIDIA GB10": ("sm_121a", 48, 24, 128),
}
# Parts with HBM; the others have GDDR or LPDDR, and other kernels win there.
_HBM = re.compile(r"A100|A800|H20\b|H100|H200|H800|GH200|B100|B200|B300|GB200|GB300")


def memory_class(name: str) -> str:
    """`HBM` or `GDDR`, by a GPU's name."""
    return "HBM" if _HBM.search(name) else "GDDR"


def named(name: str) -> Device:
    """The GPU of a name, or of its part (`l40s`, `H100 PCIe`); UnknownName lists all."""
    wanted = re.sub(r"[^a-z0-9]+", " ", name.lower()).strip()
    plain = {re.sub(r"[^a-z0-9]+", " ", full.lower()): full for full in GPUS}
    found = [full for key, full in plain.items() if wanted and f" {wanted} " in f" {key} "]
    # `h100` alone fits three names; only a full name, or a part of one name alone, decides.
    exact = plain.get(wanted) or plain.get(f"nvidia {wanted}")
    if not exact and len(found) != 1:
        near = difflib.get_close_matches(wanted, plain, n=1, cutoff=0.5)
        meant = (
            f" (it may be {listed(found)})" if found
            else f" (did you mean {plain[near[0]]!r}?)" if near else ""
        )  # fmt: skip
        raise UnknownName(f"no GPU is known as {name!r}{meant}: expected one of {listed(GPUS)}")
    full = exact or found[0]
    arch, sms, l2, memory = GPUS[full]
    return Device(
        "cuda", full, arch, sms, l2 << 20, memory << 30, datasheet_gb_s(full), "datasheet"
    )
