"""Which Xids belong to an incident. Line formats: dmesg, dmesg -T, dmesg --time-format iso, journalctl -k, /dev/kmsg, syslog."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from krea_runner.diagnose.gather import read_log
from krea_runner.diagnose.kernel import facts
from krea_runner.diagnose.layout import Layout
from krea_runner.diagnose.signatures import load_catalog
from krea_runner.diagnose.xid import XidEvent, action_of, xids_in

NOON = datetime(2026, 1, 2, 12, 0, 0, tzinfo=UTC).timestamp()
XID_79 = "NVRM: Xid (PCI:0000:3B:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def read(text: str, since: float | None = None, until: float | None = None, **more: float) -> list[XidEvent]:
    return xids_in(text, node="n1", since=since, until=until, **more)


@pytest.mark.parametrize(
    "prefix",
    [
        "[Fri Jan  2 12:00:00 2026] ",
        "2026-01-02T12:00:00,000000+00:00 ",
        "2026-01-02T13:00:00+0100 n1 kernel: ",
        "Jan 02 12:00:00 n1 kernel: ",
        "Jan  2 12:00:00 n1 kernel: [  500.1] ",
        "1767355200.000000 n1 kernel: ",
    ],
)
def test_every_clock_of_a_kernel_log_places_the_event(prefix: str) -> None:
    (event,) = read(prefix + XID_79, NOON - 60, NOON + 60)
    assert (event.at, event.number, event.pci, event.node, event.is_placed) == (NOON, 79, "0000:3b:00", "n1", True)
    assert read(prefix + XID_79, NOON + 1, NOON + 60) == []
    assert read(prefix + XID_79, NOON - 60, NOON - 1) == []


@pytest.mark.parametrize("line", [f"[  500.000000] {XID_79}", f"4,1234,500000000,-;{XID_79}"])
def test_seconds_since_boot_are_placed_by_the_time_of_the_boot(line: str) -> None:
    (event,) = read(line, NOON - 60, NOON + 60, boot_at=NOON - 500)
    assert (event.at, event.uptime_s) == (NOON, 500.0)
    assert read(line, NOON - 60, NOON + 60, boot_at=NOON - 5000) == []


def test_an_old_xid_in_a_ring_buffer_of_unknown_boot_is_not_this_incidents() -> None:
    text = f"[100.0] {XID_79}\n[900000.0] {XID_79}\n[900100.0] eth0: link up"
    (event,) = read(text, NOON - 60, NOON + 60)
    assert (event.uptime_s, event.is_placed, event.line) == (900000.0, False, 2)


def test_local_time_counts_with_the_machines_zone() -> None:
    assert read(f"[Fri Jan  2 14:00:00 2026] {XID_79}", NOON - 1, NOON + 1, utc_offset_s=7200)[0].at == NOON


def test_a_log_of_december_read_in_january_is_of_last_year() -> None:
    new_year = datetime(2026, 1, 1, 0, 5, tzinfo=UTC).timestamp()
    assert len(read(f"Dec 31 23:59:00 n1 kernel: {XID_79}", new_year - 3600, new_year)) == 1


def test_the_same_fault_within_five_seconds_is_one_event() -> None:
    other = XID_79.replace("3B", "86")
    text = "\n".join(
        f"[{at}] {line}" for at, line in [(10, XID_79), (14, XID_79), (14.5, other), (19, XID_79), (25, XID_79)]
    )
    text = text.replace("[10]", "[10.0]").replace("[14]", "[14.0]").replace("[19]", "[19.0]").replace("[25]", "[25.0]")
    assert [(e.pci, e.uptime_s, e.count) for e in read(text)] == [
        ("0000:3b:00", 10.0, 3),
        ("0000:86:00", 14.5, 1),
        ("0000:3b:00", 25.0, 1),
    ]


def test_mig_instance_pid_and_the_xid_that_was_before_are_kept() -> None:
    text = "NVRM: Xid (PCI:0000:9d:00 GPU-I:05 GPU-CI:00): 45, pid=77, name=python3, Ch 8 caused by previous Xid 149"
    (event,) = read(text)
    assert (event.instance, event.pid, event.follows, event.number) == ("GPU-I:05 GPU-CI:00", 77, 149, 45)


@pytest.mark.parametrize(
    ("number", "text", "action", "verdict"),
    [
        (79, "", "RESTART_BM", "drain_reboot"),
        (13, "", "RESTART_APP", "retry_same_nodes"),
        (63, "", "IGNORE", "record_only"),
        (95, "", "RESET_GPU", "drain_reset_gpu"),
        (149, "NETIR_LINK_EVT Fatal XC0", "WORKFLOW_NVLINK5_ERR", "suspect_then_drain_on_repeat"),
        (145, "RLW_RXPIPE Nonfatal XC0", "WORKFLOW_NVLINK5_ERR", "record_only"),
        (154, "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)", "XID_154", "drain_reboot"),
        (154, "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", "XID_154", "record_only"),
        (999, "", "NOT_IN_CATALOG", "record_only"),
    ],
)
def test_what_to_do_is_the_tables_or_the_lines_own_word(number: int, text: str, action: str, verdict: str) -> None:
    found = action_of(number, text)
    assert (found.action, found.verdict, found.snapshot) == (action, verdict, "2025-10")
    assert found.source.startswith("https://docs.nvidia.com/")


def test_an_nvswitch_error_is_a_fault_only_where_the_line_says_fatal() -> None:
    line = "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, {}, Link 30 LTSSM Fault Up"
    fatal, benign = read(line.format("Fatal"))[0], read(line.format("Non-fatal"))[0]
    assert (fatal.is_sxid, fatal.number, fatal.pci, fatal.action.is_fault) == (True, 20034, "0000:05:00", True)
    assert benign.action.is_fault is False


@given(
    st.text()
    | st.lists(
        st.sampled_from(
            [
                "[9e9.1]",
                "[1.0] ",
                XID_79,
                "\n",
                "Feb 31 25:61:61 ",
                "[Fri Xxx 99 99:99:99 0000] ",
                "9999-99-99T99:99:99Z ",
                "Xid (",
                "SXid (PCI:0000:05:00.0): 1, Fatal",
            ]
        )
    ).map("".join)
)
def test_no_line_breaks_the_reader(text: str) -> None:
    for event in xids_in(text, node="n", since=NOON, until=NOON + 1):
        assert event.count >= 1


def kernel_facts(tmp_path: Path, text: str, since: float | None) -> list[tuple[str, int]]:
    """Causes, and how many lines were one event, of what `diagnose` takes from a kernel log."""
    path = tmp_path / "dmesg"
    path.write_text(text)
    layout = Layout(nodes=["n1"], gpus_per_node=8, world_size=8)
    log = read_log(str(path), 0, load_catalog(), layout, node="n1", kernel=True)
    return [(fact.cause, fact.event.count) for fact in facts([log], layout, since)]


def test_diagnose_takes_the_same_code_within_five_seconds_for_one_event(tmp_path: Path) -> None:
    text = "".join(f"[{at}.0] {XID_79}\n" for at in (10, 14, 19, 25))
    assert kernel_facts(tmp_path, text, None) == [("gpu_fell_off_bus", 3), ("gpu_fell_off_bus", 1)]
    switch = "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up\n"
    assert kernel_facts(tmp_path, f"[1.0] {switch}[2.0] {switch}[9.0] {switch}", None) == [
        ("gpu_nvlink", 2),
        ("gpu_nvlink", 1),
    ]


def test_a_ring_buffer_full_of_old_xids_does_not_hide_this_attempts(tmp_path: Path) -> None:
    old = "".join(f"[Fri Jan  2 {n // 60:02d}:{n % 60:02d}:00 2026] {XID_79}\n" for n in range(600))
    assert kernel_facts(tmp_path, old + f"[Fri Jan  2 12:00:00 2026] {XID_79}\n", NOON - 60) == [
        ("gpu_fell_off_bus", 1)
    ]
    assert kernel_facts(tmp_path, old, NOON - 60) == []


@pytest.mark.parametrize(
    "text",
    [
        "145, RLW_RXPIPE Nonfatal XC0",
        "154, GPU recovery action changed from 0x1 (x) to 0x0 (None)",
        "43, Ch 8",
        "999, new",
    ],
)
def test_what_is_no_fault_is_no_fact(tmp_path: Path, text: str) -> None:
    assert kernel_facts(tmp_path, f"[1.0] NVRM: Xid (PCI:0000:3B:00): {text}\n", None) == []


def test_each_row_of_the_one_table_is_whole_and_names_a_cause_that_exists() -> None:
    causes, actions = load_catalog().causes, [action_of(number) for number in range(1, 173)]
    assert {action.cause for action in actions} - {""} <= set(causes)
    assert all(action.source and action.snapshot and action.action and action.verdict for action in actions)
    weak = {number for number in range(1, 173) if action_of(number).is_weak and action_of(number).cause}
    assert weak == {13, 31, 63, 137, 154}
