"""What was measured on what: the facts that go into the head of every result file."""

import ctypes
import datetime
import os
import platform
import subprocess
import sys
from functools import cache

import package
import torch


def facts(device):
    """{"machine": ..., "versions": ..., "commit": ..., "date": ..., "command": ...}"""
    return {
        "machine": gpu_facts() if device == "cuda" else cpu_facts(),
        "versions": versions(device),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command(),
    }


def command():
    """As it was given, without where the results go."""
    words = [os.path.relpath(sys.argv[0], package.ROOT), *sys.argv[1:]]
    for flag in ("--output", "--json"):
        if flag in words:
            place = words.index(flag)
            del words[place : place + 2]
    return " ".join(word for word in words if word not in ("--resume", "--force", "--quiet"))


def gpu_facts():
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "sms": properties.multi_processor_count,
        "memory_gb": round(properties.total_memory / 1e9, 1),
        "max_clock_mhz": clocks()["max_mhz"],
        "driver": driver_version(),
    }


def cpu_facts():
    model, flags = platform.processor() or platform.machine(), ""
    try:
        with open("/proc/cpuinfo") as file:
            lines = dict(line.rstrip().split("\t", 1) for line in file if "\t" in line)
        find = lambda key: next((v.lstrip("\t: ") for k, v in lines.items() if k.strip() == key), "")  # noqa: E731
        model, flags = find("model name") or model, find("flags")
    except OSError:
        pass
    isa = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags.split()]
    return {"device": model, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "isa": isa}


def versions(device):
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if device == "cuda":
        found |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
    for name in ("triton", "flash_attn", "flash_attn_3", "numpy"):
        try:
            from importlib.metadata import version

            found[name] = version(name)
        except ImportError:
            pass
    if not package.unavailable:
        found["flash_attention"] = package.flash_attention.version()
    return found


def commit():
    """Hash of the tree measured, with "+changes" where it is not clean. FLASH_ATTENTION_COMMIT says it for a copy of the
    tree that has no history, or not its own."""
    if os.environ.get("FLASH_ATTENTION_COMMIT"):
        return os.environ["FLASH_ATTENTION_COMMIT"][:12]
    run = lambda *a: subprocess.run(["git", "-C", str(package.ROOT), *a], capture_output=True, text=True)  # noqa: E731
    try:
        head = run("rev-parse", "--short=12", "HEAD")
        if head.returncode == 0:
            dirty = run("status", "--porcelain", "--untracked-files=no").stdout.strip()
            return head.stdout.strip() + ("+changes" if dirty else "")
    except OSError:
        pass
    return "unknown"


@cache
def nvml():
    """(library, handle of GPU 0), or None where NVML is not there."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle = ctypes.c_void_p()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)):
        return None
    return library, handle


# NVML's reasons that mean "slower than it could be": power cap, thermal and hardware slow-down.
THROTTLE_REASONS = {0x4: "power cap", 0x8: "hardware slow-down", 0x20: "thermal", 0x40: "thermal", 0x80: "power brake"}


def clocks():
    """{"sm_mhz", "max_mhz", "throttled"}: the SM clock now, and why it is held down, empty where it is not."""
    if nvml() is None:
        return {"sm_mhz": 0, "max_mhz": 0, "throttled": ""}
    library, handle = nvml()
    now, most, reasons = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_ulonglong()
    library.nvmlDeviceGetClockInfo(handle, 1, ctypes.byref(now))
    library.nvmlDeviceGetMaxClockInfo(handle, 1, ctypes.byref(most))
    for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
        if hasattr(library, name):  # newer drivers and older ones
            getattr(library, name)(handle, ctypes.byref(reasons))
            break
    held = sorted({text for bit, text in THROTTLE_REASONS.items() if reasons.value & bit})
    return {"sm_mhz": now.value, "max_mhz": most.value, "throttled": ", ".join(held)}


def driver_version():
    if nvml() is None:
        return "unknown"
    text = ctypes.create_string_buffer(96)
    nvml()[0].nvmlSystemGetDriverVersion(text, 96)
    return text.value.decode()
