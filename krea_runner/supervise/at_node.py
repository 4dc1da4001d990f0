"""What is collected on one node before a hung step is killed. One file, standard library, Python 3.6 and newer: its text is
handed to whatever `python3` a compute node has (supervise/collect.py), so nothing of ours is needed there.

    python3 -I -S -c THIS '{"seconds": 17, "attempt": "41.r0", ...}'

It only looks: at /proc, at Python stacks through py-spy, at the flight recorder through its FIFO, at NCCL's RAS port, at the
kernel log, at nvidia-smi. What it finds is printed while it is found, in lines short enough that srun cuts none of them (1024
bytes, 22.05.8), and written to files at the end. Whatever may block (a file of a dead file system, a process in the kernel) is
asked for on a thread that is left behind when it does not answer; SIGALRM ends all of it.
"""

import base64
import glob
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import zlib
from typing import Any, Callable, Dict, Optional, cast

Table = Dict[str, Any]
LINE_BYTES, RAS_BYTES, KERNEL_BYTES, KERNEL_LINES = 720, 64 << 20, 256 << 10, 1000
FRAMES = 40, 24  # of a thread the innermost, which wait, and the outermost, which are the script
THREADS, STACK_S, AT_ONCE = 256, 5.0, 4
STATES = dict(R="running", S="sleeping", D="uninterruptible", T="stopped", t="traced", Z="zombie", X="dead")


class Node:
    def __init__(self, order: "Table") -> None:
        self.order = order
        self.began = time.monotonic()
        self.name = os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]
        self.documents, self.lock = 0, threading.Lock()
        self.notes: "Table" = {}
        self.files: "Dict[str, Any]" = {}

    def left(self, keep: float = 0.0) -> float:
        """Seconds that may still be spent, with `keep` to spare."""
        return max(0.0, float(self.order["seconds"]) - keep - (time.monotonic() - self.began))

    def say(self, **document: Any) -> None:
        data = base64.b64encode(zlib.compress(json.dumps(document).encode())).decode()
        parts = [data[at : at + LINE_BYTES] for at in range(0, len(data), LINE_BYTES)]
        with self.lock:  # several threads say something
            for number, part in enumerate(parts):
                sys.stdout.write("KE1 %s %d %d %d %s\n" % (self.name, self.documents, number, len(parts), part))
            sys.stdout.flush()
            self.documents += 1


def main() -> None:
    order = json.loads(sys.argv[1])
    signal.alarm(int(order["seconds"]) + 2)  # its default action ends the process, whatever it waits for
    node = Node(order)
    os.environ["PATH"] = os.environ.get("PATH", "") + ":/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    ranks = find_ranks(node)
    node.say(kind="ranks", ranks=[{k: v for k, v in rank.items() if k != "environ"} for rank in ranks])
    dumps = ask_for_dumps(node, ranks)
    ras = later(ask_ras, node, ranks)
    take_stacks(node, ranks)
    node.notes["kernel_log"] = kernel_log(node)
    node.notes["flight_recorder"] = wait_for_dumps(node, dumps)
    ras.join(node.left(3.0))
    node.notes.setdefault("ras", "no answer in time")
    node.notes["nvidia_smi"] = nvidia_smi(node, ranks)
    node.notes["files"] = within(node.left(0.5), write_files, node) or "the file system did not answer"
    node.say(kind="end", seconds=round(time.monotonic() - node.began, 2), notes=node.notes)
    os._exit(0)  # waits for no thread that hangs


def later(function: "Callable[..., object]", *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args)
    thread.daemon = True
    thread.start()
    return thread


def within(seconds: float, function: "Callable[..., Any]", *args: Any) -> Any:
    """What `function` returns, or None when that takes longer, or it fails."""
    answer: "list[Any]" = []

    def work() -> None:
        try:
            answer.append(function(*args))
        except (OSError, ValueError):
            answer.append(None)

    later(work).join(seconds)
    return answer[0] if answer else None


# ------------------------------------------------------------------------------------------------------------ processes


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(1 << 20)


def peek(path: str) -> bytes:
    """Of files of the kernel that block nobody; empty where that is not possible."""
    try:
        return read(path)
    except OSError:
        return b""


def processes(node: Node) -> "dict[int, tuple[dict[str, str], int]]":
    """Those of this user that belong to the attempt: pid → (environment, parent). Reading an environment takes a lock that a
    process in the kernel may hold for ever."""
    order, own = node.order, os.environ
    found: "dict[int, tuple[dict[str, str], int]]" = {}
    step = (own.get("SLURM_JOB_ID"), own.get("SLURM_STEP_ID"))
    blocked = 0
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid() or owner_of(name) != os.geteuid():
            continue
        data = within(1.0, read, "/proc/%s/environ" % name) if blocked < 4 else None
        if data is None:
            blocked += os.path.exists("/proc/%s/exe" % name) and state_of(int(name))[0] == "D"
            continue
        words = [word.partition("=") for word in data.decode("utf-8", "replace").split("\0")]
        environ = {key: value for key, equals, value in words if equals}
        mine = environ.get("KREA_ATTEMPT") == order["attempt"] and environ.get("KREA_RUN_DIR") == order["run_dir"]
        if not order["local"]:
            if "KREA_ATTEMPT" not in environ:  # an adopted job has nothing of ours
                mine = step[0] is not None and environ.get("SLURM_JOB_ID") == step[0]
            if environ.get("SLURMD_NODENAME", node.name) != node.name:
                mine = False
            if step[0] is not None and (environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID")) == step:
                mine = False
        if mine:
            found[int(name)] = (environ, stat_of(int(name))[2])
    return found


def owner_of(pid: str) -> int:
    try:
        return os.stat("/proc/" + pid).st_uid
    except OSError:
        return -1


def find_ranks(node: Node) -> "list[Table]":
    """One record a rank: its training process and what is known of the others that it started."""
    all_processes = processes(node)
    has_rank = any(environ.get("RANK", "").isdigit() for environ, _ in all_processes.values())
    groups: "dict[tuple[str, int], list[int]]" = {}
    for pid, (environ, _) in all_processes.items():
        number = environ.get("RANK" if has_rank else "SLURM_PROCID", "")
        if number.isdigit() and (has_rank or "SLURM_STEP_ID" in environ):
            groups.setdefault((environ.get("SLURMD_NODENAME", node.name), int(number)), []).append(pid)
    beating = within(2.0, read_heartbeats, node) or {}
    ranks = [record(key, pids, all_processes, beating.get(key)) for key, pids in sorted(groups.items())]
    for (name, number), pid in sorted(beating.items()):
        if (name, number) not in groups and not any(rank["in_namespace"] for rank in ranks):
            letter, wchan = state_of(pid)
            is_ours = letter == "Z" and owner_of(str(pid)) == os.geteuid()
            ranks.append(blank(name, number, pid, "zombie" if is_ours else "gone", wchan if is_ours else ""))
    return ranks


def blank(name: str, number: int, pid: int, state: str, wchan: str) -> "Table":
    return {"node": name, "rank": number, "pid": pid, "state": state, "wchan": wchan, "threads": {},
            "others": [], "in_namespace": False, "environ": {}}  # fmt: skip


def record(key: "tuple[str, int]", pids: "list[int]", all_processes: Any, beating: "Optional[int]") -> "Table":
    pid = training_process(pids, all_processes, beating)
    letter, wchan = state_of(pid)
    rank = blank(key[0], key[1], pid, STATES.get(letter, letter or "gone"), wchan)
    rank["threads"] = threads_of(pid)
    rank["in_namespace"] = len(ids_of(pid)) > 1
    rank["environ"] = all_processes[pid][0]
    rank["others"] = sorted(one for one in pids if one != pid)[:64]
    return rank


def training_process(pids: "list[int]", all_processes: Any, beating: "Optional[int]") -> int:
    """The one that beats; else the topmost Python, below whatever shell started it; else the topmost."""
    for pid in pids:
        if beating is not None and beating in ids_of(pid):
            return pid
    depth: "dict[int, int]" = {}
    for pid in pids:
        above, depth[pid] = all_processes[pid][1], 0
        while above in pids and depth[pid] < len(pids):
            above, depth[pid] = all_processes[above][1], depth[pid] + 1
    return min(pids, key=lambda pid: (not is_python(pid), depth[pid], pid))


def is_python(pid: int) -> bool:
    return "python" in os.path.basename(program_of(pid))


def program_of(pid: int) -> str:
    try:
        return os.readlink("/proc/%d/exe" % pid)
    except OSError:
        return ""


def read_heartbeats(node: Node) -> "dict[tuple[str, int], int]":
    """(node, rank) → pid, of this node's file; with the local scheduler of all."""
    found: "dict[tuple[str, int], int]" = {}
    name = "*" if node.order["local"] else re.sub(r"[^A-Za-z0-9._+\[\]-]", "_", node.name)[:64]
    for path in glob.glob(os.path.join(glob.escape(node.order["heartbeats"]), name + ".hb")):
        for slot in re.findall(rb"khb1 rank=(\d{1,9}) .{0,400}? pid=(\d{1,10}) ", read(path)):
            found[os.path.basename(path)[:-3], int(slot[0])] = int(slot[1])
    return found


def stat_of(pid: int, thread: "Optional[str]" = None) -> "tuple[str, str, int]":
    """Name, the kernel's letter for its state, parent; empty when there is no such process."""
    data = peek("/proc/%d" % pid + ("" if thread is None else "/task/" + thread) + "/stat")
    name, _, rest = data.decode("utf-8", "replace").rpartition(")")
    words = rest.split()
    return (name.partition("(")[2], words[0], int(words[1])) if len(words) > 1 else ("", "", 0)


def state_of(pid: int, thread: "Optional[str]" = None) -> "tuple[str, str]":
    """The letter, and what it waits for in the kernel."""
    place = "/proc/%d" % pid + ("" if thread is None else "/task/" + thread)
    wchan = peek(place + "/wchan").decode("ascii", "replace").strip("\0\n ")
    return stat_of(pid, thread)[1], "" if wchan == "0" else wchan


def ids_of(pid: int) -> "list[int]":
    """Its pid here, and in the namespaces of containers below."""
    found = re.search(rb"^NSpid:([\t 0-9]+)$", peek("/proc/%d/status" % pid), re.MULTILINE)
    return [int(word) for word in found.group(1).split()] if found else [pid]


def threads_of(pid: int) -> "dict[str, int]":
    """State → how many, and of those in the kernel what they wait for."""
    counts: "dict[str, int]" = {}
    for name in (within(1.0, os.listdir, "/proc/%d/task" % pid) or [])[:THREADS]:
        letter, wchan = state_of(pid, name)
        word = STATES.get(letter, letter) + (" in " + wchan if letter == "D" and wchan else "")
        counts[word] = counts.get(word, 0) + 1
    return counts


# --------------------------------------------------------------------------------------------------------------- stacks


def take_stacks(node: Node, ranks: "list[Table]") -> None:
    """The training process of each rank first, then other Pythons that it started, a few."""
    spy = find_py_spy(node, ranks)
    alive = [rank for rank in ranks if rank["state"] not in ("gone", "zombie", "dead")]
    if spy is None:
        node.notes["stacks"] = "py-spy is not there"
        return
    jobs = [(rank, rank["pid"]) for rank in alive]
    jobs += [(rank, one) for rank in alive for one in rank["others"][:32] if is_python(one)][: 8 * len(alive)]
    for thread in [later(stack_worker, node, spy, jobs) for _ in range(AT_ONCE)]:
        thread.join(node.left(5.0))
    node.notes["stacks"] = spy


def find_py_spy(node: Node, ranks: "list[Table]") -> "Optional[str]":
    environ = ranks[0]["environ"] if ranks else {}
    folders = [os.path.join(environ[name], "bin") for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if name in environ]
    folders += environ.get("PATH", "").split(":") + os.environ["PATH"].split(":")
    folders += [os.path.dirname(program_of(ranks[0]["pid"]))] if ranks else []
    places = [node.order["py_spy"]] + [os.path.join(folder, "py-spy") for folder in folders if folder]
    return cast("Optional[str]", within(3.0, first_program, places + node.order["py_spy_maybe"]))


def first_program(places: "list[str]") -> "Optional[str]":
    return next((path for path in places if os.path.isfile(path) and os.access(path, os.X_OK)), None)


def stack_worker(node: Node, spy: str, jobs: "list[tuple[Table, int]]") -> None:
    while jobs and node.left(5.0) > 0:
        try:
            rank, pid = jobs.pop(0)
        except IndexError:
            return
        is_main = pid == rank["pid"]
        threads, error = dump(node, spy, pid)
        if is_main:
            found = [one for one in threads or () if one["os_thread_id"] == pid] + (threads or [])
            frames = found[0]["frames"] if found else []
            node.say(kind="stack", node=rank["node"], rank=rank["rank"], frames=frames, error=error)
        head = "rank %d, process %d (%s) %s" % (rank["rank"], pid, *stat_of(pid)[:2])
        head += ", threads: %s" % rank["threads"] if is_main else ", started by the rank"
        text = error if threads is None else "\n".join(as_text(thread) for thread in threads)
        node.files.setdefault("stacks", {})[(rank["rank"], not is_main, pid)] = head + "\n" + text + "\n"


def dump(node: Node, spy: str, pid: int) -> "tuple[Optional[list[Table]], str]":
    """(threads, "") or (None, why). A stopped process cannot be paused again: it is read as it stands."""
    seconds = min(STACK_S, node.left(4.0))
    code, out, err = None, b"", b""  # type: "tuple[Optional[int], bytes, bytes]"
    for how in ([], ["--nonblocking"]) if stat_of(pid)[1] not in ("T", "t") else (["--nonblocking"],):  # type: "list[str]"
        code, out, err = command([spy, "dump", "--json", "--pid", str(pid)] + how, min(seconds, node.left(4.0)))
        if code == 0 or code is None:
            break
    if code is None:
        return None, "py-spy gave no answer in %.0f s" % seconds
    try:
        return [one_thread(raw) for raw in json.loads(out.decode("utf-8", "replace"))][:THREADS], ""
    except (ValueError, TypeError, KeyError):
        return None, why_not(err.decode("utf-8", "replace"))


def why_not(said: str) -> str:
    if "Permission denied" in said or "Operation not permitted" in said or "os error 1" in said:
        scope = peek("/proc/sys/kernel/yama/ptrace_scope").decode().strip() or "not there"
        return "py-spy may not look into it (kernel.yama.ptrace_scope is %s)" % scope
    lines = [line for line in said.strip().splitlines() if line.strip()]
    return "py-spy: " + (lines[-1] if lines else "no answer")[:200]


def one_thread(raw: "Table") -> "Table":
    inner, outer = raw["frames"][: FRAMES[0]], raw["frames"][FRAMES[0] :][-FRAMES[1] :]
    frames = [[str(one["name"])[:200], str(one["filename"])[-200:], int(one["line"])] for one in inner + outer]
    name = str(raw.get("thread_name") or "")[:80]
    return {"os_thread_id": raw.get("os_thread_id"), "thread_name": name, "frames": frames}


def as_text(thread: "Table") -> str:
    lines = ["    %s (%s:%d)" % tuple(frame) for frame in thread["frames"]]
    return "\n".join(["  thread %s %s" % (thread["os_thread_id"], thread["thread_name"])] + lines)


# -------------------------------------------------------------------------------------------- flight recorder, NCCL RAS


def ask_for_dumps(node: Node, ranks: "list[Table]") -> "list[tuple[int, str, Any]]":
    """Write to the FIFO of each rank (TORCH_NCCL_DEBUG_INFO_PIPE_FILE), on which it dumps without stopping. Returns what is to
    be waited for: (rank, file, what it was before), and as a note what cannot be."""
    asked: "list[tuple[int, str, Any]]" = []
    said: "Table" = {}
    for rank in ranks:
        environ, number = rank["environ"], rank["rank"]
        fifo = environ.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "")
        prefix = environ.get("TORCH_FR_DUMP_TEMP_FILE") or environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "")
        if fifo and prefix:
            before = within(1.0, fingerprint, prefix + str(number))
            word = within(1.0, write_fifo, "/proc/%d/root" % rank["pid"], fifo + str(number) + ".pipe") or "no answer"
            if word == "asked":
                asked.append((number, prefix + str(number), before))
            else:
                said.setdefault(word, []).append(number)
    if not any("TORCH_NCCL_DEBUG_INFO_PIPE_FILE" in rank["environ"] for rank in ranks):
        said["no TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = []
    node.notes["pipes"] = said
    return asked


def write_fifo(root: str, path: str) -> str:
    """A container's /tmp is seen through its process's root."""
    for place in (path, root + path):
        try:
            descriptor = os.open(place, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            last = "no pipe" if error.errno in (2, 13) else "nobody reads the pipe" if error.errno == 6 else str(error)
            continue
        try:
            if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                return "not a pipe"
            os.write(descriptor, b"1\n")
            return "asked"
        finally:
            os.close(descriptor)
    return last


def fingerprint(path: str) -> "tuple[float, ...]":
    status = os.stat(path)
    return (status.st_ino, status.st_size, status.st_mtime)


def wait_for_dumps(node: Node, asked: "list[tuple[int, str, Any]]") -> "Table":
    """Ranks whose dump is there, whole: changed since it was asked for, and no more changing."""
    done: "list[int]" = []
    last: "dict[int, Any]" = {}
    while asked and node.left(5.0) > 0:
        for item in list(asked):
            now = within(1.0, fingerprint, item[1])
            if now and now != item[2] and now[1] > 0 and last.get(item[0]) == now:
                done.append(item[0])
                asked.remove(item)
            last[item[0]] = now
        if asked:
            time.sleep(0.3)
    return {"dumped": sorted(done), "late": sorted(item[0] for item in asked), "not_asked": node.notes.pop("pipes")}


def ask_ras(node: Node, ranks: "list[Table]") -> None:
    """One question to any process answers for the whole job, so that two nodes ask and not two thousand."""
    if not ranks or int(os.environ.get("SLURM_NODEID", "0") or 0) >= node.order["ras_nodes"]:
        node.notes["ras"] = "asked elsewhere" if ranks else "no rank here"
        return
    address = ranks[0]["environ"].get("NCCL_RAS_ADDR") or "localhost:28028"
    host, _, port = address.rpartition(":")
    try:
        report = b""
        with socket.create_connection((host or "localhost", int(port)), timeout=2.0) as talk:
            talk.sendall(b"CLIENT PROTOCOL 2\nTIMEOUT 5\nSET FORMAT json\nVERBOSE STATUS\n")
            while len(report) < RAS_BYTES and node.left(4.0) > 0:
                talk.settimeout(max(0.1, node.left(4.0)))
                part = talk.recv(1 << 16)
                if not part:
                    break
                report += part
    except (OSError, ValueError) as error:
        node.notes["ras"] = "%s: %s" % (address, error)
        if not report:
            return
    start = re.search(rb"^\s*\{", report, re.MULTILINE) if b'"nccl_version"' in report else None
    name = "%s.%s" % (node.name, "txt" if start is None else "json")
    node.files["ras"] = (name, report if start is None else report[start.start() :])
    node.notes["ras"] = "answered"


# ----------------------------------------------------------------------------------------------------- the node itself


def command(argv: "list[str]", seconds: float) -> "tuple[Optional[int], bytes, bytes]":
    """(exit code, stdout, stderr); the code is None when it took too long. One that cannot be killed is left behind."""
    try:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        return 127, b"", str(error).encode()
    try:
        out, err = process.communicate(timeout=max(0.1, seconds))
        return process.returncode, out, err
    except subprocess.TimeoutExpired:
        process.kill()
        return None, b"", b""


def kernel_log(node: Node) -> str:
    for argv in (["dmesg", "--time-format", "iso"], ["dmesg"],
                 ["journalctl", "-k", "-q", "--no-pager", "-o", "short-iso", "-n", str(KERNEL_LINES)]):  # fmt: skip
        code, out, _ = command(argv, min(3.0, node.left(4.0)))
        if code == 0 and out.strip():
            node.files["dmesg"] = b"\n".join(out[-KERNEL_BYTES:].split(b"\n")[-KERNEL_LINES:])
            return "read"
    restricted = peek("/proc/sys/kernel/dmesg_restrict") == b"1\n"
    return "may not be read (kernel.dmesg_restrict is 1)" if restricted else "not to be had"


def nvidia_smi(node: Node, ranks: "list[Table]") -> str:
    """Not where a process of ours sits in the kernel: nvidia-smi may follow it there, and what cannot be killed gets the node
    drained by Slurm."""
    if any("uninterruptible" in word for rank in ranks for word in rank["threads"]):
        return "not asked: a rank is in uninterruptible sleep"
    fields = ("index,uuid,name,pci.bus_id,utilization.gpu,utilization.memory,memory.used,power.draw,temperature.gpu,"
              "clocks_throttle_reasons.active,ecc.errors.uncorrected.volatile.total")  # fmt: skip
    code, out, err = command(["nvidia-smi", "--query-gpu=" + fields, "--format=csv"], min(5.0, node.left(2.0)))
    if code == 127:
        return "not there"
    node.files["nvidia-smi"] = out + err
    return "no answer" if code is None else "read" if code == 0 else "exit %d" % code


def write_files(node: Node) -> str:
    """Below the incident's folder, each whole or not at all. Returns "written" or why not."""
    folder = node.order["folder"]
    wanted: "dict[str, bytes]" = {}
    if "stacks" in node.files:
        texts = [text for _, text in sorted(node.files["stacks"].items())]
        wanted["stacks/%s.txt" % node.name] = "\n".join(texts).encode("utf-8", "replace")
    for name, ending in (("dmesg", "log"), ("nvidia-smi", "csv")):
        if node.files.get(name):
            wanted["%s/%s.%s" % (name, node.name, ending)] = node.files[name]
    if "ras" in node.files:
        wanted["ras/" + node.files["ras"][0]] = node.files["ras"][1]
    try:
        for name, data in wanted.items():
            path = os.path.join(folder, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            partial = os.path.join(os.path.dirname(path), ".%s.%d" % (os.path.basename(path), os.getpid()))
            with open(partial, "wb") as file:
                file.write(data)
            os.rename(partial, path)
    except OSError as error:
        return "not written: %s" % error.strerror
    return "written"


if __name__ == "__main__":
    main()
