"""`flash-attention stress`: what it reports, and that a problem is the same when it is asked for again."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path


def test_the_report_counts(command):
    report = command.json("stress", "--device", "cpu", "--problems", 12)
    assert report["problems"] == 12 and report["differences"] == []
    assert sum(report["kernels"].values()) == report["calls"] >= 2 * 12  # twice, and backward where there is one


def test_a_problem_can_be_repeated(command):
    reports = [command.json("stress", "--device", "cpu", "--seed", 5, "--problem", 7) for _ in range(2)]
    assert reports[0]["problems"] == 1 and reports[0]["kernels"] == reports[1]["kernels"]


def test_a_variant_can_be_repeated(command):
    flags = ["--device", "cpu", "--seed", 5, "--problem", 7]
    reports = [command.json("stress", *flags, "--variant", 3) for _ in range(2)]
    assert reports[0]["problems"] == 1 and reports[0]["kernels"] == reports[1]["kernels"]


def test_variants_need_no_other_kernels(command):
    """Whatever lengths, strides and inputs they have; a problem that launches nothing has none."""
    flags = ["--device", "emulator", "--arch", "sm_80", "--kernel", "forward/portable", "--repeats", 1]
    two = command.json("stress", *flags, "--problems", 2, "--variants", 1)
    varied = command.json("stress", *flags, "--problems", 7, "--variants", 6)
    assert varied["problems"] == 7 and 1 <= varied["compiled"] <= two["compiled"]


def test_processes_share_the_work(command):
    report = command.json("stress", "--device", "cpu", "--problems", 12, "--jobs", 3)
    assert report["problems"] >= 12 and report["differences"] == [] and not report["cut_off"]
    assert sum(report["kernels"].values()) == report["calls"]


def started(command, *flags):
    words = [command.path, "stress", "--device", "cpu", *map(str, flags)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def children_of(process):
    """Those that have become the command, not a copy of their parent on its way there."""
    seen = []
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        if "--part" in Path(f"/proc/{child}/cmdline").read_text().split("\0"):
            seen.append(int(child))
    return seen


def seconds_of(process):
    times = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def wait_for_work(process, count, seconds=2):
    """Until `count` processes have computed for so long. Drawing the problems takes half a second; then they tell of some."""
    while len(children_of(process)) < count or min(map(seconds_of, children_of(process))) < seconds:
        time.sleep(0.02)
    return children_of(process)


def test_a_process_that_dies_is_a_difference(command):
    process = started(command, "--minutes", 5, "--jobs", 2, "--json")
    os.kill(wait_for_work(process, 2)[0], signal.SIGKILL)
    while len(children_of(process)) > 1:
        time.sleep(0.02)
    (other,) = wait_for_work(process, 1)
    wait_for_work(process, 1, seconds_of(other) + 0.2)  # it goes on
    os.kill(other, signal.SIGKILL)
    report = json.loads(process.communicate(timeout=60)[0])
    assert process.returncode == 1 and report["problems"] > 0 and len(report["differences"]) == 2
    for difference in report["differences"]:
        assert difference["lines"] == ["it was ended by signal 9"] and "--problem" in difference["command"]


def test_a_process_that_gives_up_is_a_difference(command):
    process = started(command, "--minutes", 5, "--jobs", 2, "--json")
    for child in wait_for_work(process, 2):
        resource.prlimit(child, resource.RLIMIT_DATA, (0, 0))  # no memory, but for the stack: an error, and no signal
    report = json.loads(process.communicate(timeout=60)[0])
    assert process.returncode == 1 and report["problems"] > 0
    assert [re.sub(r"\d+", "N", d["lines"][0]) for d in report["differences"]] == [
        "it gave up with exit code N; what it said is above"
    ] * 2


def test_what_was_done_is_told_when_it_is_stopped(command):
    process = started(command, "--minutes", 5, "--jobs", 2)
    wait_for_work(process, 2)
    process.send_signal(signal.SIGTERM)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and "no difference" in text and "problems " in text


def test_an_unknown_kernel_is_named(command):
    for flag in ("--kernel", "--domain"):
        assert f"{flag}: there is no kernel 'forward/none'" in command("stress", flag, "forward/none", code=2).stderr


def test_a_kernel_that_takes_no_problem_has_shown_nothing(command):
    flags = "--device", "emulator", "--arch", "sm_90", "--domain", "backward/portable", "--kernel", "decode/mla_sm90"
    assert "nothing was compared" in command("stress", *flags, "--problems", 1, code=1).stdout


def with_half_of_every_scale(command, folder):
    """The environment in which the emulator takes the tree's kernels with one line changed: every score is half of it."""
    for part in ("kernels", "src/emulator/runtime"):
        shutil.copytree(command.path.parents[2] / part, folder / part)
    score = folder / "kernels/tile/score.cuh"
    text = score.read_text()
    assert "args.scale" in text
    score.write_text(text.replace("args.scale", "(args.scale * 0.5f)"))
    flags = "-O0 -g0"  # to compile takes longer than to run
    return {**os.environ, "FLASH_ATTENTION_KERNEL_DIR": str(folder / "kernels"), "FLASH_ATTENTION_CXX_FLAGS": flags}


def test_a_difference_is_told_with_its_kernel_and_its_command(command, tmp_path):
    environment = with_half_of_every_scale(command, tmp_path)
    flags = ["--device", "emulator", "--arch", "sm_80", "--domain", "forward/sm80", "--seed", 4, "--variants", 1]
    text = command("stress", *flags, "--problems", 2, code=1, env=environment).stdout
    told = re.search(r"DIFFERS  forward (\S+): (.*)\n(?:  .*\n)+again    flash-attention (.*)\n", text)
    kernel, problem, again = told.groups()
    assert kernel in ("forward/sm80", "decode/sm80")  # what the planner chose
    words = again.split()
    assert again.startswith("stress --device emulator --arch sm_80 --domain forward/sm80 --seed 4 --problem")
    assert f"DIFFERS  forward {kernel}: {problem}\n" in command(*words, code=1, env=environment).stdout
    other = command(*words, "--kernel", "forward/portable", code=1, env=environment).stdout
    assert f"DIFFERS  forward forward/portable: {problem}\n" in other  # the same problem


def test_the_command_has_the_repeats(command, tmp_path):
    environment = with_half_of_every_scale(command, tmp_path)
    flags = ["--device", "emulator", "--arch", "sm_80", "--kernel", "forward/portable", "--problems", 2, "--repeats", 3]
    report = json.loads(command("stress", *flags, "--json", code=1, env=environment).stdout)
    difference = report["differences"][0]
    assert difference["lines"] and difference["kernel"] == "forward/portable"
    assert " --domain forward/portable --kernel forward/portable --seed 1 --problem" in difference["command"]
    assert difference["command"].endswith(" --repeats 3")
