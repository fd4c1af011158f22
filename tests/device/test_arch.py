"""Devices: names, detection, NVML, caches, versions; without a GPU, so torch's and NVML's answers
are stand-ins.
"""

import itertools
import re
import subprocess
import sys
import types

import msgspec
import pytest

import gdntune
from gdntune.device import arch
from gdntune.device.arch import Clocks, Device
from gdntune.errors import ToolMissing, UnknownName

H100 = "NVIDIA H100 80GB HBM3"


class FakeNvml(types.ModuleType):
    """pynvml of one H100; what is in `refused` raises as NVML does."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self, reasons=0, refused=()):
        super().__init__("pynvml")
        answers = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetHandleByIndex": lambda index: f"handle {index}",
            "nvmlDeviceGetHandleByUUID": lambda uuid: f"handle of {uuid}",
            "nvmlDeviceGetMaxClockInfo": lambda handle, clock: 2619,
            "nvmlDeviceGetMemoryBusWidth": lambda handle: 5120,
            "nvmlDeviceGetClockInfo": lambda handle, clock: {1: 1980, 2: 2619}[clock],
            "nvmlDeviceGetTemperature": lambda handle, sensor: 41,
            "nvmlDeviceGetPowerUsage": lambda handle: 118_500,
            "nvmlDeviceGetUUID": lambda handle: "GPU-ab-1",
            "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 700_000,
            "nvmlDeviceGetEccMode": lambda handle: [1, 0],
            "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: reasons,
            "nvmlSystemGetDriverVersion": lambda: "580.159.04",
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 13000,
        }
        for name, answer in answers.items():
            setattr(self, name, self._refuse if name in refused else answer)

    def _refuse(self, *arguments):
        raise self.NVMLError("Not Supported")


@pytest.fixture
def fake_torch(monkeypatch):
    """A torch with one H100."""
    properties = types.SimpleNamespace(
        name=H100,
        major=9,
        minor=0,
        multi_processor_count=132,
        L2_cache_size=50 << 20,
        total_memory=80 << 30,
        uuid="ab-1",
    )
    cuda = types.SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        get_device_properties=lambda index: properties,
    )
    torch = types.SimpleNamespace(
        __version__="2.11.0", version=types.SimpleNamespace(cuda="13.0"), cuda=cuda
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


def test_importing_is_light():
    """arch, sol and timing import neither torch nor NVML's or CUPTI's bindings."""
    code = (
        "import sys; from gdntune import sol, timing; from gdntune.device import arch; "
        "print([m for m in ('torch', 'pynvml', 'cupti', 'cutlass', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103a"),
        ((12, 0), "sm_120a"),
        ((8, 0), "sm_80"),
    ],
)
def test_arch_names(capability, name):
    """Compute capabilities get the compiler's names, each of which has a stand-in to compile for."""
    assert arch.arch_name(*capability) == name
    assert arch.target(name).arch == name


def test_target_is_a_known_model():
    """A stand-in's peak is that of KNOWN, and a wrong name lists the right ones."""
    assert arch.target("sm_90a").slug == "nvidia-h100-80gb-hbm3"
    for device in arch.TARGETS.values():
        assert arch.datasheet_gb_s(device.name) == device.peak_gb_s
    with pytest.raises(UnknownName, match="sm_100a"):
        arch.target("sm_42")


@pytest.mark.parametrize(
    "given, meant", [("sm_90", "sm_90a"), ("sm_100", "sm_100a"), ("sm90a", "sm_90a")]
)
def test_a_near_arch_is_named(given, meant):
    """Fault: `--arch sm_90` was said to have no stand-in, and not that sm_90a is meant."""
    with pytest.raises(
        UnknownName,
        match=rf"'{given}' \(did you mean `{meant}`\?\): expected one of sm_80, .*, .* cpu or native",
    ):
        arch.target(given)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        (H100, 3352),
        ("NVIDIA H100 PCIe", 2039),
        ("NVIDIA H100 NVL", 3938),
        ("NVIDIA H200", 4800),
        ("NVIDIA GH200 480GB", 4000),
        ("NVIDIA GH200 144G HBM3e", 4900),
        ("NVIDIA B200", 8000),
        ("NVIDIA GB300", 8000),
        ("NVIDIA A100-SXM4-80GB", 2039),
        ("NVIDIA A100 80GB PCIe", 1935),
        ("NVIDIA A100-PCIE-40GB", 1555),
        ("NVIDIA L40S", 864),
        ("NVIDIA L4", 300),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 1792),
        ("NVIDIA Something Else", None),
        # Fault: a slice and a laptop's part had the whole card's peak.
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_datasheet(name, peak):
    """The most specific pattern counts: an H100 PCIe is not an H100 SXM."""
    assert arch.datasheet_gb_s(name) == peak


def test_detect_cuda(monkeypatch, fake_torch):
    """A CUDA device is described by torch and the datasheet; NVML stands in for an unknown name."""
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    assert arch.detect() == Device(
        "cuda", H100, "sm_90a", 132, 50 << 20, 80 << 30, 3352.0, "datasheet"
    )
    monkeypatch.setattr(arch, "KNOWN", {})
    device = arch.detect("cuda")
    assert (round(device.peak_gb_s), device.peak_source) == (3352, "nvml")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert (arch.detect().peak_gb_s, arch.detect().peak_source) == (None, "unknown")


def test_a_mig_slice_is_not_the_card(monkeypatch, fake_torch):
    """Fault: a slice was said to have its card's bandwidth, by datasheet; NVML tells the card's too."""
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    fake_torch.cuda.get_device_properties(0).name = f"{H100} MIG 3g.40gb"
    device = arch.detect("cuda")
    assert (device.peak_gb_s, device.peak_source) == (None, "unknown")
    assert device.slug == "nvidia-h100-80gb-hbm3-mig-3g-40gb"


def test_every_name_has_a_slug():
    """Fault: a name in another script had an empty slug, and its tables lay in no folder."""
    device = msgspec.structs.replace(arch.target("sm_90a"), kind="cpu")
    names = ["兆芯", "海光", "兆芯 KX-6000", "開先 KX-6000", "KX-6000", "Intel(R) Xeon®"]
    slugs = [msgspec.structs.replace(device, name=n).slug for n in names]
    assert len(set(slugs)) == len(slugs) and all(re.fullmatch("[a-z0-9-]+", s) for s in slugs)
    assert slugs[4:] == ["kx-6000", "intel-r-xeon"]


def test_detect_refuses(monkeypatch, fake_torch):
    """Asking for what is not there says why and what to do; auto takes the CPU then."""
    with pytest.raises(ToolMissing, match="expected 0 to 0"):
        arch.detect("cuda", index=1)
    fake_torch.cuda.is_available = lambda: False
    with pytest.raises(ToolMissing, match="nvidia-smi"):
        arch.detect("cuda")
    fake_torch.version.cuda = None
    with pytest.raises(ToolMissing, match="install a CUDA build of torch"):
        arch.detect("cuda")
    assert arch.detect().kind == "cpu"
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ToolMissing, match="torch is not installed"):
        arch.detect("cuda")
    with pytest.raises(UnknownName, match="auto, cuda, cpu"):
        arch.detect("gpu")


def test_detect_cpu_is_repeatable():
    """Two detections of this CPU are equal: journals are resumed by that."""
    device = arch.detect("cpu")
    assert device == arch.detect("cpu")
    assert device.kind == "cpu" and device.sm_count >= 1 and device.l2_bytes > 0
    assert (device.peak_gb_s, device.peak_source) == (None, "unknown")


@pytest.mark.parametrize(
    ("text", "name", "start"),
    [
        (
            "model name : AMD EPYC\nflags : avx2 sse avx512f\n\nmodel name : other",
            "AMD EPYC",
            "x86_64-avx512-",
        ),
        ("model name\t: Old\nflags\t\t: sse sse2", "Old", "x86_64-"),
        (
            "CPU implementer : 0x41\nCPU part : 0xd4f\nFeatures : fp asimd sve",
            "Arm 0x41 0xd4f",
            "x86_64-sve-",
        ),
    ],
    ids=["avx512", "sse", "arm"],
)
def test_cpu_identity(tmp_path, text, name, start):
    """A CPU is named by its first block of cpuinfo, and its arch by its widest vectors and a hash
    of its flags.
    """
    (tmp_path / "cpuinfo").write_text(text)
    got, flags = arch._cpu_identity(tmp_path / "cpuinfo")
    assert got == name
    assert arch._cpu_arch("x86_64", flags).startswith(start)
    assert arch._cpu_arch("x86_64", flags) != arch._cpu_arch("x86_64", (*flags, "new"))


def test_cpu_identity_without_cpuinfo(tmp_path):
    """Where there is no cpuinfo (macOS) there is still a name, and an arch without flags."""
    name, flags = arch._cpu_identity(tmp_path / "none")
    assert name and flags == ()
    assert arch._cpu_arch("arm64", flags).startswith("arm64-")


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, 1e6),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 1e6),
        ({}, 1e6),
    ],
)
def test_cgroup_quota(tmp_path, files, cpus):
    """Both versions of cgroups are read; no quota is no limit."""
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert arch._cgroup_cpus(tmp_path) == cpus


def test_last_level_cache(tmp_path, monkeypatch):
    """The highest level counts, instruction caches do not, and a silent system gets the fallback.

    GDNTUNE_LLC_MIB counts before what the system says: a virtual machine reports its host's.
    """
    monkeypatch.setenv("GDNTUNE_LLC_MIB", "48")
    assert arch.last_level_cache_bytes(tmp_path) == 48 << 20
    for wrong in ("0", "-1", "8M", "1.5"):
        monkeypatch.setenv("GDNTUNE_LLC_MIB", wrong)
        with pytest.raises(UnknownName, match="GDNTUNE_LLC_MIB=.*expected a whole number of MiB"):
            arch.last_level_cache_bytes(tmp_path)
    monkeypatch.delenv("GDNTUNE_LLC_MIB")
    assert arch.last_level_cache_bytes(tmp_path) == 32 << 20
    for index, (level, kind, size) in enumerate(
        [(1, "Data", "48K"), (3, "Unified", "36M"), (2, "Unified", "1024K")]
    ):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, value in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(f"{value}\n")
    assert arch.last_level_cache_bytes(tmp_path) == 36 << 20


def test_nvml_peak(monkeypatch):
    """An H100's memory clock and bus make 3352 GB/s; a refused question makes None."""
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    assert arch.nvml_peak_gb_s() == pytest.approx(3352.3, abs=0.1)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(refused=["nvmlDeviceGetMemoryBusWidth"]))
    assert arch.nvml_peak_gb_s() is None


def test_nvml_device_is_torchs(monkeypatch, fake_torch):
    """NVML is asked for torch's device by UUID: with CUDA_VISIBLE_DEVICES the numbers differ."""
    fake, asked = FakeNvml(), []
    fake.nvmlDeviceGetMemoryBusWidth = lambda handle: asked.append(handle) or 5120
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    arch.nvml_peak_gb_s(0)
    assert asked == ["handle of GPU-ab-1"]


def test_clocks(monkeypatch):
    """Clocks carry the event reasons in words; a field that NVML refuses is None."""
    monkeypatch.setitem(
        sys.modules, "pynvml", FakeNvml(reasons=0x44, refused=["nvmlDeviceGetTemperature"])
    )
    now = arch.clocks()
    assert now == Clocks(1980, 2619, None, 118.5, ("sw_power_cap", "hw_thermal_slowdown"))
    assert arch.throttled(now)


def test_which_card(monkeypatch):
    """UUID, power limit, the present ECC mode and the temperature; empty where NVML does not tell."""
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(refused=["nvmlDeviceGetEccMode"]))
    assert arch.card() == arch.Card("GPU-ab-1", 700.0, None, 41)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    assert arch.card().ecc is True
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert arch.card() == arch.Card()


@pytest.mark.parametrize(
    "reasons", [(), ("gpu_idle",), ("sw_power_cap",), ("applications_clocks_setting",)]
)
def test_not_throttled(reasons):
    """Idleness, set clocks and a power cap are no slowdown."""
    assert not arch.throttled(Clocks(event_reasons=reasons))


def test_a_throttled_device_is_waited_for(monkeypatch):
    """Until nothing holds its clocks down, and no longer than it takes; a device that is well is
    not waited for.
    """
    hot, well = Clocks(sm_mhz=990, event_reasons=("sw_thermal_slowdown",)), Clocks(sm_mhz=1980)
    slept: list[float] = []
    monkeypatch.setattr(arch.time, "sleep", slept.append)
    monkeypatch.setattr(arch.time, "monotonic", lambda: sum(slept))
    for states, waited in (
        ([well], 0),
        ([hot, hot, well], 2 * arch.LOOK_S),
        (itertools.repeat(hot), arch.COOL_S),
    ):
        slept.clear()
        seen = iter(states)
        monkeypatch.setattr(arch, "clocks", lambda index, seen=seen: next(seen))
        assert arch.settled(0) is (hot if waited == arch.COOL_S else well)
        assert sum(slept) == waited


def test_slowdown_in_words():
    """What held the clocks down, the least clock and the highest temperature of the looks at which
    something did.
    """
    brake = Clocks(
        sm_mhz=1200, temperature_c=60, event_reasons=("hw_power_brake_slowdown", "sw_power_cap")
    )
    heat = Clocks(sm_mhz=990, temperature_c=87, event_reasons=("sw_thermal_slowdown",))
    well = Clocks(sm_mhz=500, temperature_c=90, event_reasons=("gpu_idle",))
    assert arch.slowdown(well, Clocks()) is None
    assert (
        arch.slowdown(well, brake, heat)
        == "hw_power_brake_slowdown, sw_thermal_slowdown (SMs at 990 MHz, 87 C)"
    )
    assert arch.slowdown(well, Clocks(event_reasons=("hw_slowdown",))) == "hw_slowdown"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (Clocks(1980, 2619), Clocks(1755, 2619), "SMs from 1980 to 1755 MHz"),
        (
            Clocks(1530, 2619),
            Clocks(1980, 1593),
            "SMs from 1530 to 1980 MHz, memory from 2619 to 1593 MHz",
        ),
        (Clocks(1980, 2619), Clocks(1890, 2619, event_reasons=("sw_power_cap",)), None),
        (Clocks(345, 2619, event_reasons=("gpu_idle",)), Clocks(1980, 2619), None),
        (Clocks(), Clocks(1980, 2619), None),
    ],
)
def test_a_clock_that_moved(before, after, said):
    """By more than 5%, and only where both are known and the device was at work."""
    assert arch.shift(before, after) == said


@pytest.mark.parametrize("how", ["no binding", "no driver", "cpu"])
def test_clocks_are_empty(monkeypatch, how):
    """The CPU, a missing binding and a missing driver give empty clocks, not errors."""
    monkeypatch.setitem(
        sys.modules, "pynvml", FakeNvml(refused=["nvmlInit"]) if how == "no driver" else None
    )
    assert arch.clocks(None if how == "cpu" else 0) == Clocks()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"datasheet": 3352, "nvml": 3352.3, "measured": 3005}, None),
        ({"datasheet": 8000, "nvml": 8184, "measured": 7300}, None),
        ({"measured": 70}, None),
        ({"datasheet": 3352, "nvml": 2039, "measured": None}, "another model"),
        ({"datasheet": 3352, "measured": 3600}, "peak is wrong"),
        ({"nvml": 3352, "measured": 2800}, "84% of NVML's"),
    ],
)
def test_peak_disagreement(values, said):
    """Figures within 5% and a copy of 85 to 105% pass; the rest is said."""
    got = arch.peak_disagreement(values)
    assert got is None if said is None else said in got


def test_software(monkeypatch):
    """Versions are strings by name: the driver's where there is one, and nothing of what is not
    installed.
    """
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.setattr(arch, "PACKAGES", ("msgspec", "not-a-package-of-anyone"))
    monkeypatch.setattr(
        arch, "_first_line", lambda command: "g++ (Debian 12.2.0-14+deb12u1) 12.2.0"
    )
    found = arch.software()
    assert found.pop("msgspec")
    assert found.pop("python").startswith("3.")
    assert found.pop("gdntune") == gdntune.__version__
    assert found == {"driver": "580.159.04", "cuda": "13.0", "g++": "12.2.0"}
    assert arch.software().keys() >= {"python"}


def test_first_line_of_what_is_missing():
    """A command that is not here has no line."""
    assert arch._first_line(["no-such-command-here"]) == ""
    assert arch._first_line([sys.executable, "-c", "print('a\\nb')"]) == "a"


def test_an_index_is_no_cpu(monkeypatch):
    """Where no GPU is, the CPU in place of the one that was asked for would be found much later."""
    monkeypatch.setattr(arch, "cuda_fault", lambda index: f"no CUDA device {index}: expected 0")
    assert arch.detect("auto").kind == "cpu"
    with pytest.raises(ToolMissing, match="no CUDA device 1: expected 0, or use the CPU"):
        arch.detect("auto", 1)
