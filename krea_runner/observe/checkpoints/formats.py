"""Whose checkpoint it is, by what is in it: a table, one row a framework. The first row that fits names it.

What must be there is checked for every folder of a checkpoint by the same few rules (`RULES`), whoever wrote it: a HF Trainer
checkpoint may hold DeepSpeed's or DCP's. The rows only say how it is recognised and what shows that the save was finished.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from krea_runner.observe.checkpoints.contents import (
    Index,
    check_dcp_shard,
    check_safetensors,
    check_torch_end,
    check_torch_file,
    read_dcp_index,
    read_json,
    read_safetensors_index,
    read_torch_values,
)
from krea_runner.observe.checkpoints.tree import CheckpointError, Tree

TORCH_FILE = re.compile(r"\.(pt|pth|bin|ckpt)$")
_MODEL_STATES = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt$")
_OPTIM_STATES = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
_MP_RANK = re.compile(r"(?:^|/)mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?$")
_SHARD_OF = re.compile(r"(.*?)-?(\d{5})-of-(\d{5})(\.[a-z]+)$")
# Names that a library gives while it is writing, and takes away with a rename: Orbax, HF Trainer, NeMo, many scripts.
UNFINISHED_NAME = re.compile(
    r"\.orbax-checkpoint-tmp|^tmp-checkpoint-|(?:\.|-|_)(?:tmp|partial|incomplete|part)(?:$|[.\-_]\w*$)"
)


@dataclass(frozen=True, slots=True)
class Trouble:
    """`kind`: `begun` (what is written last is not there), `missing` (may still be written), `damaged`, `unseen`."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Format:
    name: str
    about: str
    looks_like: Callable[[Tree], bool]
    unfinished: Callable[[Tree], str]
    """What shows that the save was not finished; empty when it was, or when this format has no such sign."""
    has_sign: bool = True
    pattern: str = ""
    """What to write in run.toml, and `complete` likewise."""
    complete: str = ""


def _has(*names: str) -> Callable[[Tree], bool]:
    return lambda tree: any(name in tree.files for name in names)


def _any_name(pattern: str) -> Callable[[Tree], bool]:
    regex = re.compile(pattern)
    return lambda tree: any(regex.search(name) for name in [*tree.files, *tree.folders])


def _wants(*names: str) -> Callable[[Tree], str]:
    """The first of `names` (with its reason) that is not there."""
    return lambda tree: next((f"no {name}: it is written last" for name in names if name not in tree.files), "")


def _hf_trainer(tree: Tree) -> bool:
    """Also where only the model has been written so far: it comes first, and looks like a checkpoint of its own."""
    named = re.fullmatch(r"checkpoint-\d+", tree.root.name) and _any_name(r"\.(safetensors|bin)$")(tree)
    return bool(named) or _has("trainer_state.json", "training_args.bin")(tree)


def _orbax_unfinished(tree: Tree) -> str:
    if "_CHECKPOINT_METADATA" not in tree.files:
        return ""  # older than 0.7: the rename is the only sign, and UNFINISHED_NAME looks for it
    try:
        done = read_json(tree, "_CHECKPOINT_METADATA").get("commit_timestamp_nsecs")
    except CheckpointError as error:
        return f"_CHECKPOINT_METADATA {error}"
    return "" if done else "_CHECKPOINT_METADATA has no time of commit"


def _nemo_unfinished(tree: Tree) -> str:
    marker = tree.root.with_name(f"{tree.root.name}-unfinished")
    return f"NeMo's marker {marker.name} is there" if marker.exists() else _WEIGHTS(tree)


_WEIGHTS = _wants("weights/metadata.json")


FORMATS: tuple[Format, ...] = (
    Format("orbax", "Orbax (JAX): `STEP/`", _any_name(r"(^|/)(_CHECKPOINT_METADATA|manifest\.ocdbt)$"), _orbax_unfinished,
           pattern="{step}", complete="_CHECKPOINT_METADATA"),
    Format("nemo", "NeMo 2: `...-step=N.../weights`", _has("weights/metadata.json", "weights/common.pt"), _nemo_unfinished),
    Format("megatron", "Megatron-LM `iter_000000N`, torch_dist", _has("common.pt"), _wants(".metadata", "metadata.json"),
           pattern="iter_{step}", complete="metadata.json"),
    Format("megatron-legacy", "Megatron-LM `iter_000000N/mp_rank_*`", _any_name(r"^mp_rank_\d+(_\d+)*$"),
           lambda tree: "", has_sign=False, pattern="iter_{step}"),
    Format("hf-trainer", "HF Trainer `checkpoint-N`", _hf_trainer,
           _wants("trainer_state.json"), pattern="checkpoint-{step}", complete="trainer_state.json"),
    Format("deepspeed", "DeepSpeed `global_stepN`", _any_name(r"^[^/]*_(model|optim)_states\.pt$"),
           lambda tree: "", has_sign=False, pattern="global_step{step}"),
    Format("lightning-sharded", "Lightning sharded `.ckpt/`", lambda tree: tree.root.name.endswith(".ckpt") and not tree.is_file
           and (".metadata" in tree.files or "meta.pt" in tree.files), _wants(".metadata", "meta.pt")),
    Format("dcp", "torch.distributed.checkpoint", _any_name(r"(^|/)(\.metadata|[^/]*\.distcp)$"), lambda tree: "",
           pattern="step_{step}", complete=".metadata"),
    Format("safetensors", "safetensors, one file or with an index", _any_name(r"\.safetensors(\.index\.json)?$"),
           lambda tree: ""),
    Format("lightning", "Lightning, NeMo 1: one `.ckpt`", lambda tree: tree.is_file and tree.root.name.endswith(".ckpt"),
           lambda tree: "", pattern="step={step}.ckpt"),
    Format("torch", "torch.save: `.pt`, `.pth`, `.bin`", _any_name(TORCH_FILE.pattern), lambda tree: "", has_sign=False,
           pattern="step_{step}.pt"),
)  # fmt: skip


def recognise(tree: Tree) -> Format | None:
    """A single file has the name '' in its tree, so its own name decides."""
    if tree.is_file:
        named = Tree(tree.root, {tree.root.name: tree.files[""]})
        if TORCH_FILE.search(tree.root.name):
            return next(one for one in FORMATS if one.name == ("lightning" if tree.root.suffix == ".ckpt" else "torch"))
        return next((one for one in FORMATS if one.name == "safetensors" and one.looks_like(named)), None)
    return next((one for one in FORMATS if one.looks_like(tree)), None)


# ------------------------------------------------------------------------------------------- what must be there: structure


def _inside(folder: str, name: str) -> str | None:
    """The path in the tree of what an index in `folder` names; None where that lies outside."""
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or "\x00" in name:
        return None
    return "/".join([folder, *parts] if folder else parts)


def _held_against(tree: Tree, folder: str, index: Index, what: str) -> Iterator[Trouble]:
    found = 0
    for name, least in index.least_bytes.items():
        path = _inside(folder, name)
        if path is None:
            yield Trouble("damaged", f"{what} names a file outside of the checkpoint: {name[:100]!a}")
        elif path in tree.links:
            yield Trouble("unseen", f"{path} is a symbolic link: not followed")
        elif path not in tree.files:
            yield Trouble("missing", f"{path} is missing, {what} names it")
        elif tree.files[path].size_bytes < least:
            yield Trouble("missing", f"{path} has {tree.files[path].size_bytes} bytes where {what} wants {least}")
        else:
            found += tree.files[path].size_bytes
    if (
        len(index.least_bytes) > 0
        and found < index.total_bytes
        and all((path := _inside(folder, name)) is not None and path in tree.files for name in index.least_bytes)
    ):
        yield Trouble("missing", f"its files hold {found} bytes where {what} wants {index.total_bytes}")


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def _dcp(tree: Tree) -> Iterator[Trouble]:
    indexed = {_folder(name) for name in tree.files if name.rpartition("/")[2] == ".metadata"}
    shards = {_folder(name) for name in tree.files if name.endswith(".distcp")}
    for folder in sorted(shards - indexed):
        yield Trouble("begun", f"no {folder + '/' if folder else ''}.metadata: it is written last")
    for folder in sorted(indexed):
        name = f"{folder}/.metadata" if folder else ".metadata"
        try:
            yield from _held_against(tree, folder, read_dcp_index(tree, name), name)
        except CheckpointError as error:
            yield Trouble("damaged", f"{name} {error}")


def _safetensors_index(tree: Tree) -> Iterator[Trouble]:
    indexed = set()
    for name in sorted(tree.files):
        if not name.endswith(".index.json"):
            continue
        indexed.add(_folder(name))
        try:
            yield from _held_against(tree, _folder(name), read_safetensors_index(tree, name), name)
        except CheckpointError as error:
            yield Trouble("damaged", f"{name} {error}")
    numbered: dict[tuple[str, str], set[int]] = {}
    for name in tree.files:
        if (match := _SHARD_OF.match(name)) and _folder(name) not in indexed:
            numbered.setdefault((f"{match[1]}-*-of-{match[3]}{match[4]}", match[3]), set()).add(int(match[2]))
    for (name, of), there in sorted(numbered.items()):
        gone = next((one for one in range(1, min(int(of), 100_000) + 1) if one not in there), None)
        if gone is not None:
            yield Trouble("missing", f"{name}: number {gone} of {int(of)} is missing")
        if name.endswith(".safetensors"):
            yield Trouble("begun", f"no {name.partition('-*')[0]}.safetensors.index.json: it is written last")


def _deepspeed(tree: Tree) -> Iterator[Trouble]:
    """Ranks of a grid are numbered from 0; the last of them can be told only from inside (see `_deepspeed_inside`)."""
    for folder in sorted({_folder(name) for name in tree.files if name.endswith("_states.pt")}):
        names = [name for name in tree.files if _folder(name) == folder]
        models = [match for name in names if (match := _MODEL_STATES.search(name))]
        optims = [match for name in names if (match := _OPTIM_STATES.search(name))]
        yield from _grid([(int(one[2]), int(one[1] or 0)) for one in models], "model_states of mp_rank, pp_rank")
        yield from _grid([(int(one[2]), int(one[1])) for one in optims], "optim_states of mp_rank, pp_rank")
        if models and optims and {one[2] for one in models} != {one[2] for one in optims}:
            yield Trouble("missing", "some mp_rank has only one of model_states and optim_states")
        if optims and not models:
            yield Trouble("missing", "there are optim_states and no model_states")


def _megatron_legacy(tree: Tree) -> Iterator[Trouble]:
    ranks = [(match, name) for name in sorted(tree.folders) if (match := _MP_RANK.search(name))]
    yield from _grid([tuple(int(part or 0) for part in match.groups()) for match, _ in ranks], "mp_rank")
    for _, name in ranks:
        if not any(f"{name}/{file}" in tree.files for file in ("model_optim_rng.pt", "model_rng.pt")):
            yield Trouble("missing", f"{name}/model_optim_rng.pt is missing")


def _grid(there: list[tuple[int, ...]], what: str) -> Iterator[Trouble]:
    """Every combination of the numbers that occur, each counted from 0."""
    if not there:
        return
    seen, sizes = set(there), [max(column) + 1 for column in zip(*there, strict=True)]
    wanted = 1
    for size in sizes:
        wanted *= size
    if wanted == len(seen):
        return
    gone = next((one for one in _combinations(sizes) if one not in seen), ())
    yield Trouble(
        "missing", f"{what} {', '.join(map(str, gone))} is missing: {len(seen)} of at least {wanted} are there"
    )


def _combinations(sizes: list[int]) -> Iterator[tuple[int, ...]]:
    from itertools import islice, product

    return islice(product(*(range(size) for size in sizes)), 1_000_000)


def _orbax(tree: Tree) -> Iterator[Trouble]:
    """An item with an OCDBT database has its manifest, and data beside it."""
    items = {_folder(name) for name in tree.files if name.rpartition("/")[2] in {"_METADATA", "_sharding"}}
    for item in sorted(items):
        prefix = f"{item}/" if item else ""
        within = re.compile(re.escape(prefix) + r"ocdbt\.process_\d+")
        databases = {name for name in tree.folders if within.fullmatch(name)}
        if databases and f"{prefix}manifest.ocdbt" not in tree.files:
            yield Trouble("begun", f"{prefix}manifest.ocdbt is missing: it is written last")
        for database in sorted(databases):
            if f"{database}/manifest.ocdbt" not in tree.files:
                yield Trouble("missing", f"{database}/manifest.ocdbt is missing")
        if f"{prefix}_METADATA" not in tree.files:
            yield Trouble("missing", f"{prefix}_METADATA is missing")


def _empty_files(tree: Tree) -> Iterator[Trouble]:
    """Not of DCP: a thread or rank with nothing to write leaves an empty .distcp (torch 2.13), which no index names."""
    for name, file in tree.files.items():
        own = name or tree.root.name
        if file.size_bytes == 0 and (TORCH_FILE.search(own) or own.endswith(".safetensors")):
            yield Trouble("missing", f"{own} is empty")


def _one_file(tree: Tree) -> Iterator[Trouble]:
    """Of a checkpoint that is one file, its end is what shows that it was finished."""
    name = tree.root.name
    if not tree.is_file or tree.files[""].size_bytes == 0:
        return
    try:
        if TORCH_FILE.search(name):
            check_torch_end(tree, "")
        elif name.endswith(".safetensors"):
            check_safetensors(tree, "")
    except CheckpointError as error:
        yield Trouble("missing", f"{name} {error}")


RULES: tuple[Callable[[Tree], Iterator[Trouble]], ...] = (
    _empty_files, _one_file, _dcp, _safetensors_index, _deepspeed, _megatron_legacy, _orbax,
)  # fmt: skip


def structure(tree: Tree) -> Iterator[Trouble]:
    """All that is wrong with names and sizes."""
    for rule in RULES:
        yield from rule(tree)


# -------------------------------------------------------------------------------------------------- what is inside: headers


def header_checks(tree: Tree) -> Iterable[tuple[str, Callable[[], None]]]:
    """One small check a file, to be run side by side; each raises CheckpointError."""
    ends = _dcp_ends(tree)
    for name, file in tree.files.items():
        own = name or tree.root.name
        if file.size_bytes == 0:
            continue
        if own.endswith(".safetensors"):
            yield name, _bind(check_safetensors, tree, name)
        elif TORCH_FILE.search(own):
            yield name, _bind(check_torch_file, tree, name)
        elif name in ends:
            yield name, _bind(lambda tree, name: check_dcp_shard(tree, name, ends[name]), tree, name)
        elif own.endswith(".json"):
            yield name, _bind(_parse_json, tree, name)
    yield "", lambda: _deepspeed_inside(tree)


def _bind(check: Callable[[Tree, str], None], tree: Tree, name: str) -> Callable[[], None]:
    return lambda: check(tree, name)


def _parse_json(tree: Tree, name: str) -> None:
    import json

    try:
        json.loads(tree.read(name, 64 << 20))
    except (ValueError, RecursionError):
        raise CheckpointError("holds broken JSON") from None


def _dcp_ends(tree: Tree) -> dict[str, int]:
    ends: dict[str, int] = {}
    for name in tree.files:
        if name.rpartition("/")[2] == ".metadata":
            try:
                index = read_dcp_index(tree, name)
            except CheckpointError:
                continue  # structure has said so
            found = {_inside(_folder(name), path): end for path, end in index.least_bytes.items()}
            ends |= {path: end for path, end in found.items() if path in tree.files}
    return ends


def _deepspeed_inside(tree: Tree) -> None:
    """The number of data-parallel ranks that wrote, as the first of them knew it. Raises: CheckpointError."""
    for name in sorted(tree.files):
        if not (match := _MODEL_STATES.search(name)) or match[1] or not tree.files[name].size_bytes:
            continue
        count = read_torch_values(tree, name).get("dp_world_size")
        prefix = f"{_folder(name)}/" if "/" in name else ""
        there = sum(
            1 for other in tree.files
            if other.startswith(prefix) and (own := _OPTIM_STATES.search(other)) and own[2] == match[2]
        )  # fmt: skip
        if isinstance(count, int) and there and there != count:
            raise CheckpointError(
                f"{name} was written by {count} data-parallel ranks, of {there} there are optim_states"
            )
