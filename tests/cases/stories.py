"""Failure stories in the formats of the real programs, each with its right answer.

The wording is that of the releases named in docs/reference/signatures.md; the stories are constructed. `write(story, folder)` makes
the folder that a scorer reads: log.txt, dmesg.NODE.txt, job.json, expected.json."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Story:
    name: str
    log: str
    cause: str
    policy: str
    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    first: str = ""
    """A piece of the line that is the first evidence; `dmesg.n2.txt:...` names another file."""
    job_nodes: tuple[str, ...] = ("n1", "n2")
    gpus: int = 4
    launcher: str = "torchrun"
    still_running: bool = False
    dmesg: dict[str, str] = field(default_factory=dict)


def write(story: Story, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "log.txt").write_text(story.log)
    for node, text in story.dmesg.items():
        (folder / f"dmesg.{node}.txt").write_text(text)
    job: dict[str, Any] = {
        "job_id": 4711, "nodes": list(story.job_nodes), "gpus_per_node": story.gpus,
        "world_size": story.gpus * len(story.job_nodes), "launcher": story.launcher,
        "tasks_per_node": story.gpus if story.launcher == "srun" else 1, "rank_to_node": "block",
        "node_ips": {node: f"10.0.0.{number}" for number, node in enumerate(story.job_nodes, 1)},
        "still_running": story.still_running,
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job))
    file, _, piece = story.first.rpartition("|")
    text = story.log if not file else story.dmesg[file]
    line = next((n for n, row in enumerate(text.split("\n"), 1) if piece and piece in row), 0)
    assert line or not story.first, story.name
    expected = {
        "cause": story.cause, "policy": story.policy, "suspect_nodes": list(story.nodes), "suspect_ranks": list(story.ranks),
        "first_error_line": line, "first_error_file": f"dmesg.{file}.txt" if file else "log.txt",
    }  # fmt: skip
    (folder / "expected.json").write_text(json.dumps(expected))


# ---------------------------------------------------------------------------------------------------- pieces of logs


def steps(first: int = 10, count: int = 6, label: str = "") -> str:
    return "".join(
        f"{label}step {n:6d} | loss 2.7{n % 10} | 1.75 s/it | 3931 tok/s/gpu\n"
        for n in range(first, first + count * 10, 10)
    )


def banner(nodes: str = "n1,n2") -> str:
    return f"==> job 4711 on {nodes}\n==> start Wed Aug 02 20:40:00 2023\nNCCL version 2.21.5+cuda12.4\n"


def elastic(*failed: tuple[int, int, int, str], when: str = "E0802 21:00:00.000000 4000") -> str:
    """Rows of (rank, local rank, exit code, host); the agent's own line is about the last of them."""
    rank, local, code, host = failed[-1]
    head = f"{when} torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: {code}) local_rank: {local} (pid: {5000 + rank}) of binary: /usr/bin/python\n"
    rows = "".join(
        f"  time      : 2023-08-02_21:00:01\n  host      : {h}\n  rank      : {r} (local_rank: {lo})\n  exitcode  : {c} (pid: {5000 + r})\n"
        for r, lo, c, h in failed
    )
    return (
        head + "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n===\ntrain.py FAILED\n---\nFailures:\n"
        + rows + f"srun: error: {host}: task {0 if host == 'n1' else 1}: Exited with exit code 1\n"
    )  # fmt: skip


def watchdog(
    rank: int,
    seq: int,
    op: str = "ALLREDUCE",
    at: str = "13:21:12",
    numel: str = "NumelIn=7, NumelOut=7",
    local: int | None = None,
) -> str:
    return (
        f"[rank{rank}]:[E802 {at}.512781555 ProcessGroupNCCL.cpp:616] [Rank {rank if local is None else local}] Watchdog caught collective "
        f"operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, {numel}, Timeout(ms)=600000) ran for 600018 milliseconds before timing out.\n"
    )


def status(
    rank: int, seq: int, enqueued: int, group: str = "PG ID 0 PG GUID 0(default_pg)", local: int | None = None
) -> str:
    return (
        f"[rank{rank}]:[E802 13:21:12.612781555 ProcessGroupNCCL.cpp:1785] [{group} Rank {rank if local is None else local}]  failure detected by "
        f"watchdog at work sequence id: {seq} PG status: last enqueued work: {enqueued}, last completed work: {seq - 1}\n"
    )


def trace(error: str, prefix: str = "") -> str:
    return "".join(
        f"{prefix}{row}\n"
        for row in (
            "Traceback (most recent call last):",
            '  File "/opt/src/train.py", line 33, in main',
            "    main()",
            error,
        )
    )


def cuda(text: str, prefix: str = "") -> str:
    return (
        trace(f"RuntimeError: CUDA error: {text}", prefix)
        + f"{prefix}Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    )


CANCEL_STEP = (
    "srun: Terminating StepId=4711.0\nslurmstepd: error: *** STEP 4711.0 ON n1 CANCELLED AT 2023-08-02T21:00:05 ***\n"
)


STORIES = (
    Story("timeout-torch21-silent-rank", banner() + steps() + "".join(
        f"[E ProcessGroupNCCL.cpp:475] [Rank {r}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=15, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600009 milliseconds before timing out.\n" for r in range(8) if r != 5),
        "nccl_timeout", "restart", ranks=(5,), first="[Rank 0] Watchdog"),
    Story("timeout-late-rank-lowest-enqueued", banner() + steps() + "".join(watchdog(r, 900) + status(r, 900, 900 if r == 3 else 904) for r in range(8)),
        "nccl_timeout", "restart", ranks=(3,), first="[rank0]:[E802"),
    Story("timeout-nobody-to-blame", banner() + steps() + "".join(watchdog(r, 900) + status(r, 900, 904) for r in range(8)),
        "nccl_timeout", "restart", first="[rank0]:[E802"),
    Story("timeout-strided-group", banner() + steps() + "".join(
        watchdog(r, 77, "_ALLGATHER_BASE", numel="NumelIn=10, NumelOut=40", local=r // 2) + status(r, 77, 80, "PG ID 3 PG GUID 7(dp)", r // 2) for r in (0, 2, 6))
        + "".join(watchdog(r, 5, at="13:25:00") + status(r, 5, 6) for r in (1, 3, 5)),
        "nccl_timeout", "restart", ranks=(4,), first="[rank0]:[E802"),
    Story("desync-different-operations", banner() + steps() + "".join(watchdog(r, 90, "BROADCAST" if r == 6 else "ALLREDUCE") for r in range(8)),
        "collective_desync", "stop_for_human", ranks=(6,), first="[rank0]:[E802"),
    Story("watchdog-stuck-torch23", banner() + steps() +
        "[rank3]:[E ProcessGroupNCCL.cpp:1316] [PG 0 Rank 3] Heartbeat monitor timed out! Process will be terminated after dumping debug info. workMetaList_.size()=4\n"
        "[rank3]:[F ProcessGroupNCCL.cpp:1169] [PG 0 Rank 3] [PG 0 Rank 3] ProcessGroupNCCL's watchdog got stuck for 600 seconds without making progress in monitoring enqueued collectives.\n"
        + "".join(watchdog(r, 9, at="14:00:00") for r in range(8) if r != 3),
        "nccl_watchdog_stuck", "restart", ("n1",), (3,), first="Heartbeat monitor"),
    Story("ib-214-common-endpoint", banner() + steps() +
        "n1:100:200 [1] transport/net_ib.cc:1333 NCCL WARN NET/IB : Got completion from peer 10.0.0.3<47733> with error 12, opcode 0, len 0, vendor err 129\n"
        "n2:100:200 [1] transport/net_ib.cc:1333 NCCL WARN NET/IB : Got completion from peer 10.0.0.3<47734> with error 12, opcode 0, len 0, vendor err 129\n"
        "[rank5]:[E ProcessGroupNCCL.cpp:1182] [Rank 5] NCCL watchdog thread terminated with exception: NCCL error: remote process exited or there was a network error, NCCL version 2.14.3\n",
        "fabric_link_error", "restart_and_exclude_node", ("n3",), (9,), first="n1:100:200", job_nodes=("n1", "n2", "n3")),
    Story("ib-async-port-error", banner() + steps() +
        "n2:100:200 [0] transport/net_ib.cc:101 NCCL WARN NET/IB : mlx5_3:1 Got async event : port error\n" + "".join(watchdog(r, 9) for r in range(8)),
        "fabric_link_error", "restart_and_exclude_node", ("n2",), (4,), first="port error"),
    Story("efa-unresponsive-receiver", banner() + steps() +
        "n1:100:200 [2] ofi_process_cq:1234 NCCL WARN NET/OFI Request 0x7f completed with error. RC: 107. Error: 15 (unresponsive receiver). Completed length: 0, Request: { dev: 2, size: 8, direction: SEND }\n",
        "fabric_link_error", "restart_and_exclude_node", ("n2",), (6,), first="NET/OFI Request"),
    Story("nccl-reset-by-silent-node", banner() + steps() +
        "n1:100:200 [2] misc/socket.cc:46 NCCL WARN socketProgressOpt: Call to recv from 10.0.0.2<39871> failed : Connection reset by peer\n",
        "nccl_network_error", "restart", ("n2",), (2,), first="socketProgressOpt"),
    Story("gpu-xid79-behind-a-hang", banner() + steps() + "".join(watchdog(r, 9, at="20:59:00") + status(r, 9, 10) for r in range(8)),
        "gpu_fell_off_bus", "restart_and_exclude_node", ("n2",), (), first="n2|Xid (PCI:0000:c3:00): 79",
        dmesg={"n2": "[Wed Aug  2 19:00:00 2023] NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.\n"
               "[Wed Aug  2 20:49:00 2023] NVRM: Xid (PCI:0000:c3:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
               "[Wed Aug  2 20:49:01 2023] NVRM: Xid (PCI:0000:c3:00): 45, pid=9, name=python3, Ch 0000\n"}),
    Story("gpu-ecc-from-cuda", banner() + steps() + cuda("uncorrectable ECC error encountered", "[rank6]: "),
        "gpu_ecc", "restart_and_exclude_node", ("n2",), (6,), first="uncorrectable ECC"),
    Story("gpu-xid-13-is-the-code", banner() + steps() + cuda("an illegal memory access was encountered", "[rank6]: "),
        "cuda_illegal_access", "restart", (), (6,), first="illegal memory",
        dmesg={"n2": "[Wed Aug  2 20:49:00 2023] NVRM: Xid (PCI:0000:c3:00): 13, pid=5006, name=python3, Graphics SM Warp Exception on (GPC 0)\n"}),
    Story("gpu-802-before-init", banner() + trace(
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that might have already set an error? Error 802: system not yet initialized")
        + elastic((4, 0, 1, "n2"), (5, 1, 1, "n2"), (6, 2, 1, "n2"), (7, 3, 1, "n2")),
        "gpu_init_failure", "restart_and_exclude_node", ("n2",), (4, 5, 6, 7), first="Error 802"),
    Story("gpu-hang-xid109", banner() + steps() + cuda("unspecified launch failure", "[rank1]: "),
        "gpu_hang_driver", "restart_and_exclude_node", ("n1",), (1,), first="unspecified launch",
        dmesg={"n1": "[100.5] NVRM: Xid (PCI:0000:43:00): 109, pid=5001, name=python3, Ch 00000008, errorString CTX SWITCH TIMEOUT, Info 0x5c01d\n"}),
    Story("oom-torch113", banner("n1") + trace(
        "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 3; 79.15 GiB total capacity; 70.10 GiB already allocated; 1.00 GiB free; 72.00 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try setting max_split_size_mb")
        + elastic((3, 3, 1, "n1")), "cuda_oom", "stop_for_human", (), (3,), first="CUDA out of memory", job_nodes=("n1",)),
    Story("host-oom-kernel-log", banner() + steps() + "".join(f"W0802 20:58:0{n}.000000 40 torch/distributed/elastic/multiprocessing/api.py:897] Sending process {n} closing signal SIGTERM\n" for n in range(3))
        + elastic((6, 2, -9, "n2")), "host_oom", "restart", (), (6,), first="n2|oom-kill",
        dmesg={"n2": "[Wed Aug  2 20:55:00 2023] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=x,mems_allowed=0,oom_memcg=/slurm/uid_1/job_4711,task_memcg=/s,task=python3,pid=5006,uid=1\n"}),
    Story("segv-table-root-is-only-the-lowest", banner() + steps() + elastic((0, 0, 1, "n1"), (2, 2, -11, "n1")),
        "process_signal_crash", "restart", (), (2,), first="failed (exitcode: -11)"),
    Story("killed-without-a-reason", banner() + steps() + "srun: error: n2: task 5: Killed\n" + CANCEL_STEP + "srun: error: n1: tasks 0-3: Terminated\n",
        "process_signal_crash", "restart", (), (5,), first="task 5: Killed", launcher="srun"),
    Story("killed-by-the-teardown", banner() + steps() + trace("ValueError: bad batch 3", "[rank2]: ") + "srun: error: n1: task 2: Exited with exit code 1\n"
        + CANCEL_STEP + "srun: error: n2: tasks 4-7: Killed\n", "user_exception", "stop_for_human", (), (2,), first="ValueError", launcher="srun"),
    Story("dataloader-exited", banner() + steps() + trace("RuntimeError: DataLoader worker (pid(s) 77, 78) exited unexpectedly", "[rank4]: "),
        "dataloader_worker_died", "restart", (), (4,), first="exited unexpectedly"),
    Story("shm-open", banner() + trace("RuntimeError: unable to open shared memory object </torch_77_1_0> in read-write mode: No space left on device (28)", "[rank1]: "),
        "shm_exhausted", "stop_for_human", (), (1,), first="unable to open"),
    Story("quota", banner() + steps() + trace("OSError: [Errno 122] Disk quota exceeded: '/home/u/ckpt'", "[rank0]: "),
        "storage_full", "stop_for_human", (), (0,), first="Disk quota"),
    Story("lustre-evicted-one-node", banner() + steps() + "".join(trace("OSError: [Errno 108] Cannot send after transport endpoint shutdown: '/lustre/x'", f"[rank{r}]: ") for r in (4, 5, 6, 7)),
        "storage_io_error", "restart_and_exclude_node", ("n2",), (4, 5, 6, 7), first="Cannot send",
        dmesg={"n2": "[88.1] LustreError: 167-0: scratch-OST0003-osc-ff: This client was evicted by scratch-OST0003; in progress operations using this service will fail.\n"}),
    Story("safetensors", banner() + "".join(trace("safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer", f"[rank{r}]: ") for r in range(8)),
        "checkpoint_corrupt", "stop_for_human", first="MetadataIncompleteBuffer"),
    Story("hub-429", banner() + "HTTP Error 429 thrown while requesting GET https://huggingface.co/x\nRetrying in 1s [Retry 1/5].\n"
        + trace("huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url: https://huggingface.co/x", "[rank0]: "),
        "external_service_error", "restart", (), (0,), first="HfHubHTTPError"),
    Story("import-error-everywhere", banner() + "".join(trace("ModuleNotFoundError: No module named 'flash_attn'", f"[rank{r}]: ") for r in range(8)),
        "user_exception", "stop_for_human", first="ModuleNotFoundError"),
    Story("exception-with-an-unusual-name", banner() + steps() + trace("torch._dynamo.exc.Unsupported: call_function BuiltinVariable", "[rank3]: "),
        "user_exception", "stop_for_human", (), (3,), first="Unsupported"),
    Story("import-error-on-one-node", banner() + "".join(trace("ModuleNotFoundError: No module named 'apex'", f"[rank{r}]: ") for r in (4, 5, 6, 7)),
        "storage_io_error", "restart_and_exclude_node", ("n2",), (4, 5, 6, 7), first="ModuleNotFoundError"),
    Story("duplicate-gpu", banner() + "".join(f"\nn{1 + r // 4}:{100 + r}:200 [0] init.cc:795 NCCL WARN Duplicate GPU detected : rank {r} and rank {r ^ 1} both on CUDA device 1b000\n" for r in range(8)),
        "launch_config_error", "stop_for_human", first="Duplicate GPU"),
    Story("bad-argument", banner() + "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --lrr 3e-4\n" * 4 + elastic((0, 0, 2, "n1")),
        "launch_config_error", "stop_for_human", first="unrecognized"),
    Story("deepspeed-loss-scale", banner() + steps() + "".join(trace("Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.", f"[rank{r}]: ") for r in range(8)),
        "numeric_divergence", "stop_for_human", first="loss scale"),
    Story("sdc-persistent-names-the-attempt-before", banner("n1") + steps() +
        "ERROR:megatron.core.rerun_state_machine:Unexpected result nan on rank 2 at iteration #41 invocation #4 (message='x')\n"
        "ERROR:megatron.core.rerun_state_machine:Rank 2, node n1, device 2, iteration #41: First rerun: unexpected result is reproducible within the tolerance (nan = nan)\n"
        "srun: error: n1: tasks 0-3: Exited with exit code 16\n" + banner("n2") +
        "ERROR:megatron.core.rerun_state_machine:Rank 2, node n2, device 2, iteration #41: Second rerun: unexpected result is not reproducible on a different GPU, therefore was likely incorrect (2.1 != nan)\n"
        "ERROR:megatron.core.rerun_state_machine:Rank 2, node n2, device 2, iteration #41: Possible persistent error!\n"
        "srun: error: n2: tasks 0-3: Exited with exit code 17\n",
        "silent_data_corruption", "restart_and_exclude_node", ("n1",), (2,), first="Second rerun"),
    Story("node-failure", banner() + steps() +
        "n1:100:200 [2] misc/socket.cc:46 NCCL WARN socketProgressOpt: Call to recv from 10.0.0.2<39871> failed : Connection reset by peer\n"
        "srun: error: Node failure on n2\nslurmstepd: error: *** JOB 4711 ON n1 CANCELLED AT 2023-08-02T21:00:05 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***\n",
        "node_failure", "restart_and_exclude_node", ("n2",), (4, 5, 6, 7), first="Node failure"),
    Story("unkillable-step", banner() + steps() + "slurmstepd: error: *** JOB 4711 STEPD TERMINATED ON n2 AT 2023-08-02T21:00:05 DUE TO JOB NOT ENDING WITH SIGNALS ***\n",
        "node_failure", "restart_and_exclude_node", ("n2",), (4, 5, 6, 7), first="NOT ENDING"),
    Story("preempted-by-requeue", banner() + steps() + "slurmstepd: error: *** JOB 4711 ON n1 CANCELLED AT 2023-08-02T21:00:05 DUE TO JOB REQUEUE ***\n" + trace("ConnectionResetError: [Errno 104] Connection reset by peer"),
        "slurm_preempted", "restart", first="JOB REQUEUE"),
    Story("step-refused", "srun: error: Unable to create step for job 4711: Memory required by task is not available\n",
        "slurm_launch_failure", "restart", first="Unable to create"),
    Story("port-taken", banner() + trace("RuntimeError: The server socket has failed to listen on any local network address. The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).", "[rank0]: "),
        "rendezvous_failure", "restart", ("n1",), (0,), first="Address already"),
    Story("second-attempt-has-its-own-reason", banner() + steps() + trace("ValueError: old and fixed", "[rank1]: ") + "srun: error: n1: task 0: Exited with exit code 1\n"
        "slurmstepd: error: *** JOB 4711 ON n1 CANCELLED AT 2023-08-02T20:50:05 DUE TO JOB REQUEUE ***\n" + banner() + cuda("device-side assert triggered", "[rank5]: "),
        "cuda_device_assert", "stop_for_human", (), (5,), first="device-side assert triggered"),
    Story("torchelastic-recovered", banner() + steps() + trace("ValueError: bad batch", "[rank1]: ") +
        "E0802 20:50:00.000000 4000 torch/distributed/elastic/agent/server/api.py:900] [default] Worker group FAILED. 3/3 attempts left; will restart worker group\n" + steps(100),
        "healthy_running", "not_a_crash", still_running=True),
    Story("checkpoint-pause", banner() + steps() + "saving checkpoint to /ckpt/x (this takes a while)\n", "healthy_running", "not_a_crash", still_running=True),
    Story("finished-with-noise", banner() + steps() + "[after training is done] datetime: 2023-08-02 21:00:00\n"
        "[rank1]:[W802 21:00:10.438540588 TCPStore.cpp:106] [c10d] recvValue failed on SocketImpl(fd=83, addr=[n1]:38648): Connection was likely closed.\n==> exit status 0\n",
        "completed", "not_a_crash"),
    Story("cancelled-by-a-person", banner() + steps() + "slurmstepd: error: *** JOB 4711 ON n1 CANCELLED AT 2023-08-02T21:00:05 ***\n" + trace("KeyboardInterrupt"),
        "slurm_cancelled", "not_a_crash", first="CANCELLED AT"),
    Story("time-limit", banner() + steps() + "slurmstepd: error: *** JOB 4711 ON n1 CANCELLED AT 2023-08-02T21:00:05 DUE TO TIME LIMIT ***\n" + "srun: error: n1: tasks 0-3: Terminated\n",
        "slurm_time_limit", "restart", first="TIME LIMIT"),
    Story("nvswitch-fatal-after-old-xids", banner() + steps() + cuda("unspecified launch failure", "[rank5]: "),
        "gpu_nvlink", "restart_and_exclude_node", ("n2",), (5,), first="unspecified launch failure",
        dmesg={"n1": "[Wed Aug  2 09:00:00 2023] NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.\n" * 200,
               "n2": "".join(f"[Wed Aug  2 {hour:02d}:00:00 2023] NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.\n" for hour in range(19))
               + "[Wed Aug  2 20:59:58 2023] nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up\n"
               + "[Wed Aug  2 20:59:58 2023] nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Severity 1 Engine instance 30 Sub-engine instance 00\n"}),
    Story("ranks-that-miss-a-killed-one", banner() + steps() + "srun: error: n2: task 6: Killed\n"
        + "".join(trace("trainer.comm.PeerLost: a peer does not answer", f"[rank{r}]: ") for r in (0, 1, 2, 3, 4, 5, 7)) + "srun: error: n1: tasks 0-3: Exited with exit code 1\n",
        "process_signal_crash", "restart", ("n2",), (6,), first="task 6: Killed", launcher="srun"),
    Story("nothing-but-an-exit-code", banner() + steps() + "srun: error: n1: tasks 0-3: Exited with exit code 255\n", "unknown_failure", "restart", first="255"),
)  # fmt: skip
