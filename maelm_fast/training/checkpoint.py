"""Checkpoints: model, optimiser and progress, in safetensors and JSON, so that loading one executes nothing.

    step_N/model.safetensors, optimizer.safetensors    written by one process
    step_N/shard-0000R-....safetensors                 by each of several: its share, with its place in the whole
    step_N/state.json, checksums.json

One process writes whole tensors, which every tool reads, and needs no engine for it. Several write by PyTorch's
distributed checkpoint, in safetensors too, since its own format is a pickle. The tensors' names are the same, and any
number of processes goes on from either.

The data's state is the number of updates done and dropout's is a function of it, so no generator state is kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from maelm_fast.errors import UserError
from maelm_fast.training.files import (
    begin_directory,
    finish_directory,
    read_checksums,
    steps,
    sums_of,
    write_directory,
    write_json,
)
from maelm_fast.training.parallel import Processes, part_like

log = logging.getLogger(__name__)

T = TypeVar("T")
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"


class Checkpoints:
    """The checkpoints of a run, as they are written. Of several processes each calls every method."""

    def __init__(
        self, directory: Path, keep: int, processes: Processes | None = None, background: bool = False
    ) -> None:
        """keep: how many to leave. background: `save` only copies the tensors into the host's memory, and a thread
        writes them."""
        self.directory, self.keep = directory, keep
        self.group = (processes or Processes(torch.device("cpu"))).beside()
        self._thread = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._under_way: Future[None] | None = None

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        best: dict[str, Tensor] | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Write directory/step_N, whole or not at all, then remove all but the newest `keep` up to it. A later one is
        damaged, or the run would have gone on from it; it is overwritten when the run gets there.

        best: other weights of the model, to be kept beside it. before: called first, by rank 0. Raises OSError, in all
        processes, with a message of its own."""
        try:
            self.wait()
        except OSError as error:
            log.error("%s", error)
        weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        moments = optimizer_tensors(model, optimizer)
        if self._thread is None:
            self._save(step, weights, moments, state, best, before)
            return
        weights, moments = ({name: t.to("cpu", copy=True) for name, t in part.items()} for part in (weights, moments))
        self._under_way = self._thread.submit(self._save, step, weights, moments, state, best, before)

    def wait(self) -> None:
        """Until what `save` began is on the disk. Raises its OSError."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def _save(
        self,
        step: int,
        weights: dict[str, Tensor],
        moments: dict[str, Tensor],
        state: dict[str, Any],
        best: dict[str, Tensor] | None,
        before: Callable[[], None],
    ) -> None:
        path, group = self.directory / f"step_{step}", self.group
        aside = path.with_name(f".{path.name}.tmp")

        def begin() -> None:
            before()
            for torn in self.directory.glob(".step_*.tmp"):  # of a process that was killed while it saved
                shutil.rmtree(torn)
            if path.exists():  # damaged, or passed over by a resume further back
                shutil.rmtree(path)
            begin_directory(path)

        def write() -> dict[str, str]:
            if group.world == 1:
                write_whole(aside, weights, moments)
                if best is not None:
                    save_file(best, aside / "best.safetensors")
            else:
                _write_share(aside, {**weights, **moments}, group)
            if group.is_main:
                write_json(aside / STATE, state)
            return sums_of(sorted(aside.iterdir()) if group.world == 1 else _share_of(aside, group.rank))

        try:
            self._together(begin, only_main=True)
            sums = {name: digest for share in self._together(write) for name, digest in share.items()}
            self._together(lambda: finish_directory(path, sums), only_main=True)
        except BaseException as error:
            if group.is_main:
                shutil.rmtree(aside, ignore_errors=True)
            if isinstance(error, OSError):
                raise OSError(f"cannot save a checkpoint in {self.directory}: {error}") from None
            raise
        if group.is_main:
            remove_old(self.directory, self.keep, step)

    def _together(self, function: Callable[[], T], only_main: bool = False) -> list[T]:
        """What each process returns, unless None; raises in all of them what the disk said to one."""
        value, said = None, None
        try:
            if self.group.is_main or not only_main:
                value = function()
        except (OSError, SafetensorError) as error:
            said = (isinstance(error, OSError) and error.strerror) or str(error)
        told = self.group.everyone((value, said))
        for _, said in told:
            if said is not None:
                raise OSError(said)
        return [value for value, _ in told if value is not None]


def write_whole(directory: Path, weights: dict[str, Tensor], moments: dict[str, Tensor]) -> None:
    """A checkpoint's tensors as one process writes them."""
    for name, tensors in ((MODEL, weights), (OPTIMIZER, moments)):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / name)


def _write_share(directory: Path, tensors: dict[str, Tensor], group: Processes) -> None:
    """This process's share, which the engine chooses."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
    try:
        save(tensors, storage_writer=writer, process_group=group.group)
    except CheckpointException as error:  # in all processes, when one of them fails
        rank, (reason, _) = min(error.failures.items())
        if not isinstance(reason, OSError):
            raise
        raise OSError(f"rank {rank}: {reason.strerror or reason}") from None


def _share_of(directory: Path, rank: int) -> list[Path]:
    return [*directory.glob(f"shard-{rank + 1:05d}-*"), *([directory / STATE] if rank == 0 else [])]


def remove_old(directory: Path, keep: int, step: int) -> None:
    """Removes all but the newest `keep` up to `step`."""
    for other in [other for other in steps(directory) if other <= step][:-keep]:
        shutil.rmtree(directory / f"step_{other}")


def read_state(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
    return state


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Read a checkpoint that was found whole into model and optimiser, whichever way either is divided over processes;
    nothing is communicated. Raises UserError if it is of another model or lacks a part."""
    source: _Whole | _Shares = _Whole(path, optimizer is not None) if (path / MODEL).exists() else _Shares(path)
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    targets = weights if optimizer is None else weights | _moments(source.shapes, model, optimizer)
    for name, target in targets.items():
        if source.shapes.get(name) != target.shape:
            raise UserError(f"{path}: {name} is missing, in part, or of another shape; it is of another model or torn")
    source.read_into(targets)


def consolidate(path: Path, out: Path) -> None:
    """Writes the checkpoint `out` as one process would have, from one that was found whole. Raises OSError."""
    shares = _Shares(path)
    tensors = {name: torch.empty(shape, dtype=shares.dtypes[name]) for name, shape in shares.shapes.items()}
    shares.read_into(tensors)
    moments = {name: tensor for name, tensor in tensors.items() if name.partition(".")[2] in tensors}
    weights = {name: tensor for name, tensor in tensors.items() if name not in moments}

    def fill(aside: Path) -> None:
        write_whole(aside, weights, moments)
        write_json(aside / STATE, read_state(path))

    write_directory(out, fill)


class _Whole:
    """Tensors as one process writes them."""

    def __init__(self, path: Path, optimizer: bool) -> None:
        self.tensors = load_file(path / MODEL)
        if optimizer:
            self.tensors |= load_file(path / OPTIMIZER)
        self.shapes = {name: tensor.shape for name, tensor in self.tensors.items()}

    def read_into(self, targets: dict[str, Tensor]) -> None:
        for name, target in targets.items():
            target.copy_(part_like(self.tensors[name], target))


class _Shares:
    """Tensors as several processes write them. shapes: without those of which a part is not there, which the engine
    would leave as it was."""

    def __init__(self, path: Path) -> None:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

        self.reader = HuggingFaceStorageReader(str(path))
        found: dict[str, Any] = self.reader.read_metadata().state_dict_metadata
        there = {name: sum(chunk.sizes.numel() for chunk in tensor.chunks) for name, tensor in found.items()}
        self.shapes = {name: tensor.size for name, tensor in found.items() if there[name] == tensor.size.numel()}
        self.dtypes = {name: tensor.properties.dtype for name, tensor in found.items()}

    def read_into(self, targets: dict[str, Tensor]) -> None:
        from torch.distributed.checkpoint.state_dict_loader import load

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load(dict(targets), storage_reader=self.reader, no_dist=True)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state by its own and the parameters' names, "exp_avg.head.dense.weight", to be saved."""
    return {
        f"{key}.{name}": value.detach()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _moments(shapes: dict[str, torch.Size], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The inverse of optimizer_tensors, but for the values, which are to be read. A run whose every update so far was
    skipped may have none."""
    parameters = dict(model.named_parameters())
    for full_name, shape in shapes.items():
        key, _, name = full_name.partition(".")
        if name in parameters:
            like = parameters[name]
            alike = shape == like.shape
            optimizer.state[like][key] = torch.zeros_like(like) if alike else torch.zeros(shape, device=like.device)
    return optimizer_tensors(model, optimizer)


def model_checksum(path: Path) -> str:
    """Of the weights, as written down when they were; whoever loads them compares. Raises OSError, ValueError."""
    sums = read_checksums(path)
    if MODEL in sums:
        return sums[MODEL]
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()
