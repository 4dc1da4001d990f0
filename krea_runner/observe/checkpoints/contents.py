"""What is inside the files: zip directories of torch.save, safetensors headers, the index of DCP. Small reads, nothing run."""

import json
import struct
import zipfile
from dataclasses import dataclass
from typing import BinaryIO, cast

from krea_runner.observe.checkpoints.pickles import MOST_BYTES, Made, read_pickle
from krea_runner.observe.checkpoints.tree import CheckpointError, Tree, read_at

ZIP_END = struct.Struct("<4s4H2LH")
# torch.save before 1.6, or with _use_new_zipfile_serialization=False: protocol 2, then this number.
LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
MOST_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MOST_JSON_BYTES = 64 << 20
MOST_DIRECTORY_BYTES = 64 << 20


# ------------------------------------------------------------------------------------------------------- torch.save


def check_torch_file(tree: Tree, name: str) -> None:
    """A zip archive whose directory lies at its end and whose members lie inside it; or the older form.

    Raises: CheckpointError.
    """
    with tree.open(name) as file:
        _archive(file, tree.files[name].size_bytes)


def check_torch_end(tree: Tree, name: str) -> None:
    """As `check_torch_file`, but only whether its end has been written: one small read. Raises: CheckpointError."""
    with tree.open(name) as file:
        _directory_bytes(file, tree.files[name].size_bytes)


def _directory_bytes(file: BinaryIO, size: int) -> int | None:
    """None for the older form, which has no directory. A writer of ours never adds a comment, so the record ends the file."""
    start = read_at(file, 0, len(LEGACY_MAGIC))
    if start == LEGACY_MAGIC:
        return None
    if not start.startswith(b"PK"):
        what = "only zero bytes at its start: space was set aside and nothing written" if not any(start) else ""
        raise CheckpointError(what or "is no file of torch.save")
    end = read_at(file, max(0, size - ZIP_END.size), ZIP_END.size)
    if len(end) < ZIP_END.size or end[:4] != b"PK\x05\x06":
        raise CheckpointError("is cut short: the zip directory at its end is missing")
    return int(ZIP_END.unpack(end)[5])


def _archive(file: BinaryIO, size: int) -> list[zipfile.ZipInfo]:
    directory = _directory_bytes(file, size)
    if directory is None:
        return []
    if directory > MOST_DIRECTORY_BYTES:
        raise CheckpointError(
            f"has a zip directory of {directory} bytes, more than {MOST_DIRECTORY_BYTES} are not read"
        )
    try:
        members = zipfile.ZipFile(file).infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error, OSError) as error:
        raise CheckpointError(f"has a broken zip directory ({str(error)[:80]!a})") from None
    for member in members:
        if member.header_offset + member.compress_size > size:
            raise CheckpointError(f"is cut short: {member.filename[-60:]!a} would end behind it")
    return members


def read_torch_values(tree: Tree, name: str) -> dict[str, object]:
    """The plain values at the top of a torch.save file (`global_step`, `dp_world_size`, ...); empty where it is no table.

    Raises: CheckpointError.
    """
    with tree.open(name) as file:
        members = _archive(file, tree.files[name].size_bytes)
        data = next((one for one in members if one.filename.endswith("/data.pkl")), None)
        if data is None or data.compress_type != zipfile.ZIP_STORED or data.file_size > MOST_BYTES:
            return {}
        local = read_at(file, data.header_offset, 30)
        if len(local) < 30:
            raise CheckpointError("is cut short")
        start = data.header_offset + 30 + sum(struct.unpack("<2H", local[26:30]))
        value = read_pickle(read_at(file, start, data.file_size))
    if isinstance(value, Made):
        value = value.items
    return {key: what for key, what in value.items() if isinstance(key, str)} if isinstance(value, dict) else {}


# ------------------------------------------------------------------------------------------------------ safetensors


def check_safetensors(tree: Tree, name: str) -> None:
    """The header is there, and the file ends where its last tensor does. Raises: CheckpointError."""
    size = tree.files[name].size_bytes
    with tree.open(name) as file:
        start = read_at(file, 0, 8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 0 < length <= size - 8:
            raise CheckpointError("is cut short or no safetensors file: its header would end behind it")
        if length > MOST_HEADER_BYTES:
            raise CheckpointError(f"has a header of {length} bytes, more than the library takes")
        header = _json(read_at(file, 8, length))
    ends = [0]
    for key, tensor in header.items():
        if key == "__metadata__":
            continue
        offsets = tensor.get("data_offsets") if isinstance(tensor, dict) else None
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(one) is int for one in offsets):
            raise CheckpointError("has a broken header")
        ends.append(offsets[1])
    if size != 8 + length + max(ends):
        raise CheckpointError(f"has {size} bytes where its header says {8 + length + max(ends)}")


@dataclass(frozen=True, slots=True)
class Index:
    """`least_bytes` of each file that the index names; `total_bytes` of all of them together, at least."""

    least_bytes: dict[str, int]
    total_bytes: int = 0


def read_safetensors_index(tree: Tree, name: str) -> Index:
    """Raises: CheckpointError."""
    document = read_json(tree, name)
    names, metadata = document.get("weight_map"), document.get("metadata")
    if not isinstance(names, dict) or not all(isinstance(one, str) for one in names.values()):
        raise CheckpointError("is no index: it has no weight_map")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return Index(dict.fromkeys(names.values(), 1), int(total) if isinstance(total, int | float) else 0)


def read_json(tree: Tree, name: str) -> dict[str, object]:
    """Raises: CheckpointError where it is no table."""
    return _json(tree.read(name, MOST_JSON_BYTES))


def _json(data: bytes) -> dict[str, object]:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise CheckpointError("holds broken JSON") from None
    if not isinstance(document, dict):
        raise CheckpointError("holds JSON that is no table")
    return cast(dict[str, object], document)


# --------------------------------------------------------------------------------------------------------------- DCP


def read_dcp_index(tree: Tree, name: str) -> Index:
    """Where `.metadata` says that the parts of each file lie. Written by torch.distributed.checkpoint 2.13 and by
    Megatron-Core 0.16, whose class has another name. Raises: CheckpointError.
    """
    value = read_pickle(tree.read(name, MOST_BYTES))
    stored = value.fields().get("storage_data") if isinstance(value, Made) else None
    if not isinstance(stored, dict):
        raise CheckpointError("is no index of torch.distributed.checkpoint")
    ends: dict[str, int] = {}
    for info in stored.values():
        fields = info.fields() if isinstance(info, Made) else {}
        path, offset, length = (fields.get(key) for key in ("relative_path", "offset", "length"))
        if not isinstance(path, str) or not isinstance(offset, int) or not isinstance(length, int):
            raise CheckpointError("is an index that does not say where its parts lie")
        ends[path] = max(ends.get(path, 0), offset + length)
    return Index(ends)


def check_dcp_shard(tree: Tree, name: str, end: int) -> None:
    """Each part is a torch.save of its own: the first one begins, and the last one ends, where the index says.

    Raises: CheckpointError.
    """
    with tree.open(name) as file:
        start = read_at(file, 0, 4)
        zips = start == b"PK\x03\x04"  # else in safetensors' form, or changed by a transform of the user's
        if not any(start) or (zips and not any(read_at(file, max(0, end - ZIP_END.size), ZIP_END.size))):
            raise CheckpointError("holds zero bytes where its data should be: a sparse or half-written file")
