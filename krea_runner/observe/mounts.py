"""Which file system a path is on, as far as this host knows."""

from pathlib import Path


def file_system(folder: Path, mountinfo: str) -> tuple[str, frozenset[str]]:
    """Type and mount options of the file system that holds `folder`, from /proc/self/mountinfo (proc(5))."""
    best, kind, options = "", "unknown", frozenset[str]()
    target = f"{folder.resolve()}/"
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        mount = fields[4].encode().decode("unicode_escape")
        if target.startswith(mount.rstrip("/") + "/") and len(mount) >= len(best):
            best, kind = mount, tail[0]
            options = frozenset(fields[5].split(",")) | frozenset(tail[2].split(",") if len(tail) > 2 else ())
    return kind, options
