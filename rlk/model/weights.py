"""Hugging Face checkpoints in and out, and resharding between tensor-parallel layouts.

All three walk `parameter_specs`: a local parameter is the shards of its checkpoint tensors, one below the other.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rlk.collectives import Communicator
from rlk.errors import UsageError
from rlk.files import disk_errors
from rlk.model.config import ModelConfig, read_json
from rlk.model.qwen3 import ParameterSpec, Part, Qwen3

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
MAX_FILE_BYTES = 5 * 10**9  # an exported checkpoint is cut into files of at most this size, as transformers does
CARRIED_FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt",
                 "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")

Read = Callable[[Part, tuple[slice, ...]], torch.Tensor]


def fill(model: Qwen3, read: Read) -> None:
    """Copy this rank's shards into the model's storage, rounding to its dtype.

    `read(part, region)` returns that region of the checkpoint's tensor. Rows of vocabulary padding become zero.
    """
    rank, world = model.tp_comm.rank, model.tp_comm.world
    for spec in model.specs:
        row = 0
        for part in spec.parts:
            rows, *rest = part.shard(rank, world)
            size = rows.stop - rows.start
            target = model.parameters[spec.name].detach()[row:row + size]
            real = max(0, min(rows.stop, part.shape[0]) - rows.start)
            if real:
                target[:real].copy_(read(part, (slice(rows.start, rows.start + real), *rest)))
            target[real:].zero_()
            row += size


def load_model(directory: str | Path, dtype: torch.dtype, device: str | torch.device = "cpu",
               tp_comm: Communicator | None = None, leaves: int = 1, shards: int = 1) -> Qwen3:
    """Read this rank's shards of a checkpoint (one safetensors file, or several with an index).

    Raises UsageError naming the tensor, what was got and what was expected.
    """
    directory = Path(directory)
    model = Qwen3(ModelConfig.from_pretrained(directory), dtype, device, tp_comm, leaves, shards)
    with _Checkpoint(directory) as files:
        files.check(model.specs, model.config.tie_embeddings)
        fill(model, files.read)
    return model


def weight_files(directory: Path) -> list[str]:
    """Names of a checkpoint's safetensors files, sorted: those in its index, or the one file where there is no index.

    Raises UsageError for an index that names no file.
    """
    index = directory / INDEX_FILE
    if not index.exists():
        return [SINGLE_FILE]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UsageError(f"{index} has no weight_map; fetch the checkpoint again")
    return sorted(set(weight_map.values()))


class _Checkpoint:
    """The safetensors files of a directory, open for lazy slicing."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._handles = []
        self._where = {}
        for name in weight_files(directory):
            try:
                handle = safe_open(directory / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise UsageError(f"{directory / name} cannot be read: {error}; fetch the checkpoint again") from None
            self._handles.append(handle)
            self._where |= dict.fromkeys(handle.keys(), handle)

    def __enter__(self) -> _Checkpoint:
        return self

    def __exit__(self, *_) -> None:
        for handle in self._handles:
            handle.__exit__(None, None, None)

    def check(self, specs: list[ParameterSpec], tied: bool) -> None:
        """Names and shapes of every tensor, before anything is copied."""
        parts = {part.hf_name: part for spec in specs for part in spec.parts}
        for name, part in parts.items():
            if name not in self._where:
                raise UsageError(f"{self.directory} has no tensor {name}, expected shape {part.shape}; "
                                 "fetch the checkpoint again, or check tie_word_embeddings in its config.json")
            got = tuple(self._where[name].get_slice(name).get_shape())
            if got != part.shape:
                raise UsageError(f"{self.directory}: tensor {name} has shape {got}, expected {part.shape} "
                                 "from config.json")
        # A tied checkpoint may repeat the embedding as lm_head, which transformers ignores too.
        extra = sorted(set(self._where) - set(parts) - ({"lm_head.weight"} if tied else set()))
        if extra:
            raise UsageError(f"{self.directory} has {len(extra)} tensors that Qwen3 lacks, the first is {extra[0]}; "
                             "expected a dense Qwen3 checkpoint")

    def read(self, part: Part, region: tuple[slice, ...]) -> torch.Tensor:
        return self._where[part.hf_name].get_slice(part.hf_name)[region]


def gather_parameter(model: Qwen3, spec: ParameterSpec) -> dict[str, torch.Tensor]:
    """Whole checkpoint tensors of one parameter, vocabulary padding included, from the shards of the TP group.

    A collective: every rank of the group calls it, and gets the tensors on the model's device.
    """
    comm = model.tp_comm
    local = model.parameters[spec.name].detach()
    shards = [local] if comm.world == 1 or not spec.tp_sharded else list(comm.all_gather(local))
    tensors, row = {}, 0
    for part in spec.parts:
        rows = part.local_shape(comm.world)[0]
        pieces = [shard[row:row + rows] for shard in shards]
        tensors[part.hf_name] = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=part.split)
        row += rows
    return tensors


def gather_full(model: Qwen3, keep: bool = True) -> dict[str, torch.Tensor]:
    """The whole checkpoint: Hugging Face name -> contiguous tensor in host memory, without vocabulary padding.

    A collective over the TP group. A rank that does not `keep` it takes part only, and gets an empty dict: eight
    copies of a large model would not fit in one host.
    """
    full = {}
    for spec in model.specs:
        tensors = gather_parameter(model, spec)
        for part in spec.parts if keep else ():
            full[part.hf_name] = tensors[part.hf_name][:part.shape[0]].cpu().contiguous()
    return full


def storage_checksum(model: Qwen3) -> str:
    """SHA-256 of the storage's bytes, in hexadecimal."""
    return hashlib.sha256(model.storage.detach().cpu().view(torch.uint8).numpy()).hexdigest()


def reshard_into(target: Qwen3, source: Qwen3) -> None:
    """Fill `target` (rollout's layout) from `source` (the trainer's), and stamp its policy_version and checksum.

    A collective over the source's TP group, which holds the whole model whatever the target's layout is. One
    parameter is gathered at a time, so that no second copy of the model exists.
    """
    rank, world = target.tp_comm.rank, target.tp_comm.world
    for spec in source.specs:
        tensors = gather_parameter(source, spec)
        row = 0
        for part in spec.parts:
            region = part.shard(rank, world)
            rows = part.local_shape(world)[0]
            target.parameters[spec.name].detach()[row:row + rows].copy_(tensors[part.hf_name][region])
            row += rows
    target.policy_version = source.policy_version
    target.checksum = storage_checksum(target)


def save_model(model: Qwen3, directory: str | Path, world: Communicator, source: str | Path | None = None) -> None:
    """Write a Hugging Face checkpoint. A collective over `world`, whose rank 0 writes.

    It is written beside `directory` and renamed, so a half-written checkpoint never has the name. `source` is the
    checkpoint whose tokenizer and generation config are carried over. Raises UsageError if `directory` is there
    already, or cannot be written.
    """
    directory = Path(directory)
    if directory.exists():
        raise UsageError(f"{directory} exists already, expected a new directory; choose another or remove it")
    world.barrier()  # every rank has looked before rank 0 makes it
    tensors = gather_full(model, keep=world.rank == 0)
    if world.rank == 0:
        partial = directory.with_name(f".{directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            with disk_errors(directory.absolute()):
                partial.mkdir(parents=True)
                write_checkpoint(partial, model.config, tensors, source and Path(source))
                partial.rename(directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    world.barrier()


def write_checkpoint(directory: Path, config: ModelConfig, tensors: dict[str, torch.Tensor],
                     source: Path | None = None) -> None:
    """Write config.json, generation_config.json and safetensors files to a directory; `source` as in save_model."""
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    _write_json(directory / "config.json", config.as_hugging_face(dtype))
    _write_json(directory / "generation_config.json", {"eos_token_id": list(config.eos_token_ids) or None})
    for name in CARRIED_FILES:
        if source and (source / name).exists():
            shutil.copyfile(source / name, directory / name)

    files, size = [{}], 0
    for name, tensor in tensors.items():
        if size and size + tensor.nbytes > MAX_FILE_BYTES:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += tensor.nbytes
    if len(files) == 1:
        save_file(files[0], directory / SINGLE_FILE, metadata={"format": "pt"})
        return
    weight_map = {}
    for number, content in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file(content, directory / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(content, name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(directory / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
