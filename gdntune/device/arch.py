"""Names, detects and describes devices: peaks, SMs, caches, clocks, versions. torch and NVML are
imported on use.
"""

import contextlib
import difflib
import hashlib
import importlib.metadata
import math
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from gdntune import __version__
from gdntune.device import nvml
from gdntune.errors import ToolMissing, UnknownName, listed

Kind = Literal["cuda", "cpu"]
DEFAULT_LLC_BYTES = 32 << 20
PROC_CPUINFO = Path("/proc/cpuinfo")
CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
CGROUP = Path("/sys/fs/cgroup")

# Datasheet DRAM bandwidth in GB/s by a pattern of the name that torch and NVML report; the first
# that matches counts.
KNOWN: dict[str, float] = {
    r"GB300|B300": 8000.0,
    r"GB200|B200|B100": 8000.0,
    # Before `GH200`, which fits this name too; likewise H100's variants before H100.
    r"GH200.*(144G|HBM3e)": 4900.0,
    r"GH200": 4000.0,
    r"H200": 4800.0,
    r"H100 NVL": 3938.0,
    r"H100 PCIe": 2039.0,
    r"H100|H800": 3352.0,
    r"\bH20\b": 4000.0,
    r"A100.*80GB PCIe": 1935.0,
    r"A100.*80GB|A800.*80GB": 2039.0,
    r"A100.*40GB|A800.*40GB": 1555.0,
    r"RTX PRO 6000.*Server": 1597.0,
    r"RTX PRO 6000": 1792.0,
    r"RTX 5090": 1792.0,
    r"RTX 4090": 1008.0,
    r"RTX 6000 Ada": 960.0,
    r"\bL40S?\b|\bL20\b": 864.0,
    r"\bL4\b": 300.0,
    r"\bA10\b": 600.0,
    r"GB10\b": 273.0,
}

# A slice has some of a card's memory, a laptop's part a narrower bus.
MIG = r"\bMIG\b"
PART_OF_A_CARD = rf"{MIG}|\bLaptop\b|\bMobile\b|with Max-Q"

# NVML's bits of the clock-event reasons, in the words of nvidia-smi.
EVENT_REASONS: dict[int, str] = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
# A power cap is missing here: at full load it is a GPU's normal state, not a fault of the
# measurement.
THROTTLES = frozenset(
    {"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"}
)
# How long a cell waits for a throttled device to cool, and between two looks at it.
COOL_S, LOOK_S = 10.0, 0.25
# A clock that moved by more than this is another clock.
SHIFT = 0.05

# What may change a kernel's code or its time; all go into a journal's header.
PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cupti-python")


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a table is keyed on, and what is known of it before anything is timed.

    name: as torch reports it ("NVIDIA H100 80GB HBM3"), or the CPU's model name.
    arch: the compiler's name ("sm_90a"); of a CPU its machine, its widest vectors and a hash of its
        flags ("x86_64-avx512-1a2b3c4d"), since its objects are built for the CPU at hand and are
        SIGILL on another.
    sm_count: SMs, or usable threads. l2_bytes: L2, or the last-level cache.
    peak_gb_s: the DRAM's peak, 1e9 bytes a second; None where only a measurement could tell. What
        `detect` returns is never measured, so that two detections of one machine are equal;
        `timing.measured_peaks` measures.
    """

    kind: Kind
    name: str
    arch: str
    sm_count: Annotated[int, msgspec.Meta(ge=1)]
    l2_bytes: Annotated[int, msgspec.Meta(ge=0)]
    memory_bytes: Annotated[int, msgspec.Meta(ge=0)]
    peak_gb_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    peak_source: Literal["datasheet", "nvml", "measured", "unknown"] = "unknown"

    @property
    def slug(self) -> str:
        """The name as a folder: `nvidia-h100-80gb-hbm3`. Where letters of other scripts are lost, a
        hash of the name stands for them.
        """
        # Two names that differ only in letters of other scripts must not share a folder.
        plain = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        if plain and not any(c.isalpha() and not c.isascii() for c in self.name):
            return plain
        return f"{plain or self.kind}-{hashlib.sha256(self.name.encode()).hexdigest()[:8]}"


class Clocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Clocks in MHz, temperature in Celsius, power in W, and why the clocks are what they are.
    None: not readable.
    """

    sm_mhz: int | None = None
    memory_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    event_reasons: tuple[str, ...] = ()


class Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One GPU among those of its model, as it was at one time. None: not readable.

    power_limit_w: what it may draw, W. ecc: whether its memory is checked.
    """

    uuid: str | None = None
    power_limit_w: float | None = None
    ecc: bool | None = None
    temperature_c: int | None = None


# Stand-ins for compiling and planning without the GPU, from NVIDIA's architecture papers; `detect`
# reads the real one.
# arch: name, SMs, MiB of L2, GiB of memory, GB/s.
_STAND_INS: dict[str, tuple[str, int, int, int, float]] = {
    "sm_80": ("NVIDIA A100-SXM4-80GB", 108, 40, 80, 2039.0),
    "sm_89": ("NVIDIA L40S", 142, 96, 48, 864.0),
    "sm_90a": ("NVIDIA H100 80GB HBM3", 132, 50, 80, 3352.0),
    "sm_100a": ("NVIDIA B200", 148, 126, 180, 8000.0),
    "sm_103a": ("NVIDIA B300 SXM6 AC", 148, 126, 268, 8000.0),
    "sm_120a": ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 188, 128, 96, 1597.0),
}
TARGETS: dict[str, Device] = {
    arch: Device("cuda", name, arch, sms, l2 << 20, memory << 30, peak, "datasheet")
    for arch, (name, sms, l2, memory, peak) in _STAND_INS.items()
}


def target(arch: str) -> Device:
    """A device to compile for that need not be here: `sm_90a` is an H100, `sm_100a` a B200.
    UnknownName lists all.
    """
    if arch not in TARGETS:
        near = difflib.get_close_matches(arch, TARGETS, n=1)
        meant = f" (did you mean `{near[0]}`?)" if near else ""
        raise UnknownName(
            f"no arch is called {arch!r}{meant}: expected one of {listed(TARGETS)}, or on the"
            " command line cpu or native"
        )
    return TARGETS[arch]


def arch_name(major: int, minor: int) -> str:
    """The compiler's name of a compute capability; from 9.0 on with the `a` of
    architecture-specific features.
    """
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def datasheet_gb_s(name: str) -> float | None:
    """The datasheet's DRAM bandwidth, GB/s; None for a name that KNOWN has no pattern for, a MIG
    slice or a laptop's part, which share a card's name and not its memory.
    """
    if re.search(PART_OF_A_CARD, name):
        return None
    return next((peak for pattern, peak in KNOWN.items() if re.search(pattern, name)), None)


def detect(kind: Literal["auto", "cuda", "cpu"] = "auto", index: int = 0) -> Device:
    """The device at hand: the CUDA device `index` (torch's numbering), or the CPU.

    `auto` is CUDA where torch has it. Raises ToolMissing where CUDA is asked for, by name or by an
    index that is not 0, and not there.
    """
    if kind not in ("auto", "cuda", "cpu"):
        raise UnknownName(f"device {kind!r}: expected one of auto, cuda, cpu")
    if kind == "cpu":
        return _detect_cpu()
    fault = cuda_fault(index)
    if fault is None:
        return _detect_cuda(index)
    # Asked for by name or number, so no fall back: tables of a CPU in place of a GPU's would be
    # found much later.
    if kind == "cuda" or index:
        raise ToolMissing(
            f"{fault}, or use the CPU (device: cpu in a config, --device cpu on the command line)"
        )
    return _detect_cpu()


def cuda_fault(index: int = 0) -> str | None:
    """Why torch has no CUDA device `index` here, and what to do about it, but for the CPU instead;
    None where it has.
    """
    try:
        import torch
    except ImportError:
        return "no CUDA device: torch is not installed; install a CUDA build of torch"
    if torch.version.cuda is None:
        return (
            f"no CUDA device: torch {torch.__version__} is built without CUDA; install a CUDA build"
            " of torch"
        )
    if not torch.cuda.is_available():
        return (
            f"no CUDA device: torch {torch.__version__} finds no GPU or no driver; see `nvidia-smi`"
            " and check CUDA_VISIBLE_DEVICES"
        )
    if not 0 <= index < torch.cuda.device_count():
        return (
            f"no CUDA device {index}: expected 0 to {torch.cuda.device_count() - 1}; check"
            " CUDA_VISIBLE_DEVICES"
        )
    return None


def _detect_cuda(index: int) -> Device:
    import torch

    p = torch.cuda.get_device_properties(index)
    peak, source = datasheet_gb_s(p.name), "datasheet"
    # NVML tells the whole card's bandwidth, of which a MIG slice has a share.
    if peak is None and not re.search(MIG, p.name):
        peak, source = nvml_peak_gb_s(index), "nvml"
    return Device(
        kind="cuda",
        name=p.name,
        arch=arch_name(p.major, p.minor),
        sm_count=p.multi_processor_count,
        l2_bytes=p.L2_cache_size,
        memory_bytes=p.total_memory,
        peak_gb_s=peak,
        peak_source=source if peak is not None else "unknown",  # type: ignore[arg-type]
    )


def _detect_cpu() -> Device:
    name, flags = _cpu_identity(PROC_CPUINFO)
    return Device(
        kind="cpu",
        name=name,
        arch=_cpu_arch(platform.machine() or "cpu", flags),
        sm_count=cpu_threads(),
        l2_bytes=last_level_cache_bytes(),
        memory_bytes=_host_memory_bytes(),
    )


def _cpu_identity(cpuinfo: Path) -> tuple[str, tuple[str, ...]]:
    """The CPU's model name, and its flags; none where the system does not list them."""
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            # The first CPU's block speaks for all.
            fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name", "")
    if not name and platform.system() == "Darwin":
        name = _first_line(["sysctl", "-n", "machdep.cpu.brand_string"])
    # Arm's cpuinfo has no model name.
    if not name and "CPU part" in fields:
        name = f"Arm {fields.get('CPU implementer', '')} {fields['CPU part']}"
    flags = fields.get("flags") or fields.get("Features") or ""
    return name or platform.processor() or platform.machine() or "CPU", tuple(sorted(flags.split()))


def _cpu_arch(machine: str, flags: tuple[str, ...]) -> str:
    """The machine, its widest vectors and a hash of its flags; where no flags are listed the
    model's name is hashed.
    """
    # The widest first: the name is for people, the hash is what keeps another CPU's objects away.
    families = {"avx512": "avx512f", "avx2": "avx2", "sve": "sve", "neon": "asimd"}
    vectors = [family for family, flag in families.items() if flag in flags][:1]
    text = " ".join(flags) or _cpu_identity(PROC_CPUINFO)[0]
    return "-".join([machine.lower(), *vectors, hashlib.sha256(text.encode()).hexdigest()[:8]])


def cpu_threads() -> int:
    """Threads worth starting: the cores this process may run on, and no more than its cgroup's
    quota pays for.
    """
    # Not on macOS.
    affinity = getattr(os, "sched_getaffinity", None)
    # A container on a large host may use few of its cores; a thread a core would then wait for the
    # others at each barrier.
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min(cores, math.ceil(_cgroup_cpus(CGROUP))))


def _cgroup_cpus(root: Path) -> float:
    """The quota of the cgroup (v2, then v1) in CPUs; a large number where there is none."""
    with contextlib.suppress(OSError, ValueError):
        # cgroup v2 has both in one file, v1 one each; a failed read of the first means v1, or no
        # limit.
        quota, period = (root / "cpu.max").read_text().split()
        return 1e6 if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        limit = int((root / "cpu/cpu.cfs_quota_us").read_text())
        return limit / int((root / "cpu/cpu.cfs_period_us").read_text()) if limit > 0 else 1e6
    return 1e6


def last_level_cache_bytes(root: Path = CPU_CACHES) -> int:
    """The size of the first core's last-level data cache; 32 MiB where the system does not say.

    GDNTUNE_LLC_MIB overrides the system's word: a virtual machine reports its host's cache, of
    which it has a share. Raises UnknownName for a value that is not a number of MiB.
    """
    if given := os.environ.get("GDNTUNE_LLC_MIB"):
        if not (given.isascii() and given.isdigit() and 0 < int(given) < 1 << 20):
            raise UnknownName(
                f"GDNTUNE_LLC_MIB={given!r}: expected a whole number of MiB, such as 32"
            )
        return int(given) << 20
    found: list[tuple[int, int]] = []
    for folder in sorted(root.glob("index*")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            # L1i and the like hold no data; their level may equal L1d's.
            if (folder / "type").read_text().strip() != "Instruction":
                size = (folder / "size").read_text().strip()
                scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[size[-1]]
                found.append((int((folder / "level").read_text()), int(size[:-1]) * scale))
    return max(found)[1] if found else DEFAULT_LLC_BYTES


def _host_memory_bytes() -> int:
    # Not every system has these names.
    with contextlib.suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 0


def nvml_peak_gb_s(index: int = 0) -> float | None:
    """2 * highest memory clock * bus width: 3352 GB/s of an H100 (2619 MHz, 5120 bits). None: it
    cannot be read.
    """
    with nvml.opened() as lib:
        handle = lib and nvml.device(lib, index)
        if handle is None:
            return None
        # The highest clock, not the current one: idle memory is clocked down.
        mhz = nvml.query(lib, "nvmlDeviceGetMaxClockInfo", handle, lib.NVML_CLOCK_MEM)
        bits = nvml.query(lib, "nvmlDeviceGetMemoryBusWidth", handle)
        return 2 * mhz * bits / 8 / 1e3 if mhz and bits else None


def clocks(index: int | None = 0) -> Clocks:
    """The clocks of torch's CUDA device `index` now; empty for `index=None` (the CPU) and where
    there is no NVML.
    """
    if index is None:
        return Clocks()
    with nvml.opened() as lib:
        handle = lib and nvml.device(lib, index)
        if handle is None:
            return Clocks()
        power_mw = nvml.query(lib, "nvmlDeviceGetPowerUsage", handle)
        # The second name is that of bindings before 12.2.
        reasons = "nvmlDeviceGetCurrentClocksEventReasons nvmlDeviceGetCurrentClocksThrottleReasons"
        mask = nvml.query(lib, reasons, handle) or 0
        return Clocks(
            sm_mhz=nvml.query(lib, "nvmlDeviceGetClockInfo", handle, lib.NVML_CLOCK_SM),
            memory_mhz=nvml.query(lib, "nvmlDeviceGetClockInfo", handle, lib.NVML_CLOCK_MEM),
            temperature_c=nvml.query(
                lib, "nvmlDeviceGetTemperature", handle, lib.NVML_TEMPERATURE_GPU
            ),
            power_w=None if power_mw is None else power_mw / 1e3,
            event_reasons=tuple(name for bit, name in EVENT_REASONS.items() if mask & bit),
        )


def card(index: int = 0) -> Card:
    """Which GPU torch's CUDA device `index` is, and how it is set; empty without NVML."""
    with nvml.opened() as lib:
        handle = lib and nvml.device(lib, index)
        if handle is None:
            return Card()
        uuid = nvml.query(lib, "nvmlDeviceGetUUID", handle)
        limit_mw = nvml.query(lib, "nvmlDeviceGetEnforcedPowerLimit", handle)
        ecc = nvml.query(lib, "nvmlDeviceGetEccMode", handle)
        return Card(
            uuid=uuid.decode() if isinstance(uuid, bytes) else uuid,
            power_limit_w=None if limit_mw is None else limit_mw / 1e3,
            # the present mode, then the one after a reboot
            ecc=None if ecc is None else bool(ecc[0]),
            temperature_c=nvml.query(
                lib, "nvmlDeviceGetTemperature", handle, lib.NVML_TEMPERATURE_GPU
            ),
        )


def throttled(now: Clocks) -> bool:
    """Whether heat, a power brake or another hardware slowdown held the clocks down; a plain power
    cap is not one.
    """
    return not THROTTLES.isdisjoint(now.event_reasons)


def settled(index: int | None = 0) -> Clocks:
    """`clocks` as soon as nothing throttles the device, or after COOL_S all the same."""
    end = time.monotonic() + COOL_S
    # Waiting has an end: a card in a hot rack throttles for good, and its cells are then marked
    # instead.
    while throttled(now := clocks(index)) and time.monotonic() < end:
        time.sleep(LOOK_S)
    return now


def slowdown(*seen: Clocks) -> str | None:
    """What held the clocks down, and the least clock and highest temperature seen meanwhile; None:
    nothing did.
    """
    found = [now for now in seen if throttled(now)]
    if not found:
        return None
    reasons = sorted(
        {reason for now in found for reason in THROTTLES.intersection(now.event_reasons)}
    )
    mhz = min((now.sm_mhz for now in found if now.sm_mhz is not None), default=None)
    heat = max((now.temperature_c for now in found if now.temperature_c is not None), default=None)
    at = [f"SMs at {mhz} MHz"] * (mhz is not None) + [f"{heat} C"] * (heat is not None)
    return f"{', '.join(reasons)} ({', '.join(at)})" if at else ", ".join(reasons)


def shift(before: Clocks, after: Clocks) -> str | None:
    """How the clock of the SMs or the memory moved between two looks, by more than SHIFT; None:
    neither did, or the device was idle.
    """
    # An idle GPU's clocks are its resting ones; between them and those at work lies no shift.
    if "gpu_idle" in {*before.event_reasons, *after.event_reasons}:
        return None
    pairs = {"SMs": (before.sm_mhz, after.sm_mhz), "memory": (before.memory_mhz, after.memory_mhz)}
    moved = {
        name: (a, b) for name, (a, b) in pairs.items() if a and b and abs(a - b) > SHIFT * max(a, b)
    }
    return ", ".join(f"{name} from {a} to {b} MHz" for name, (a, b) in moved.items()) or None


def peak_disagreement(values: Mapping[str, float | None]) -> str | None:
    """What is odd about the figures of one DRAM's peak, GB/s, by source (datasheet, nvml,
    measured); None: nothing.

    Datasheet and NVML must agree within 5%. A measured copy reaches 85% to 105% of either: 90% on
    an H100, 3005 GB/s.
    """
    found: list[str] = []
    sheet, board, measured = (values.get(source) for source in ("datasheet", "nvml", "measured"))
    if sheet and board and abs(board / sheet - 1) > 0.05:
        found.append(
            f"NVML's clock and bus give {board:.0f} GB/s, the datasheet {sheet:.0f}: one is another"
            " model's"
        )
    for source, peak in (("the datasheet's", sheet), ("NVML's", board)):
        # More than the peak is no luck: the figure belongs to another model. Far less is other
        # work, or a throttled clock.
        if peak and measured and not 0.85 <= measured / peak <= 1.05:
            why = (
                "that peak is wrong"
                if measured > peak
                else "look for other work on the GPU, and at its clocks"
            )
            found.append(
                f"a copy moved {measured:.0f} GB/s, {measured / peak:.0%} of {source} {peak:.0f}:"
                f" {why}"
            )
    return "; ".join(found) or None


def _first_line(command: list[str]) -> str:
    """The first line that a command prints, or an empty string."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.partition("\n")[0].strip()


def software() -> dict[str, str]:
    """Versions of what decides a measurement, and of gdntune; what is not here is left out. Imports
    none of it but NVML's binding.
    """
    found = {"gdntune": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    with nvml.opened() as lib:
        if lib is not None:
            if driver := nvml.query(lib, "nvmlSystemGetDriverVersion"):
                found["driver"] = driver.decode() if isinstance(driver, bytes) else str(driver)
            if cuda := nvml.query(lib, "nvmlSystemGetCudaDriverVersion_v2"):
                found["cuda"] = f"{cuda // 1000}.{cuda % 1000 // 10}"
    if version := re.search(r"\d+\.\d+(\.\d+)?\s*$", _first_line(["g++", "--version"])):
        found["g++"] = version.group().strip()
    return found
