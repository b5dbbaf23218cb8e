"""The processes of a run, and the one file that knows torch.distributed (but for checkpoint.py, which saves by it).

torchrun starts the processes and tells each who it is. A run of one process communicates nothing and wraps nothing:
`Processes` is all of it, and what several do otherwise is a subclass.

Words: the processes are numbered by their rank, 0 to world - 1; rank 0, the main one, writes files and shows progress.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from maelm_fast.config import RuntimeConfig, require
from maelm_fast.errors import UserError
from maelm_fast.model.block import Block
from maelm_fast.model.maelm import MaeLm
from maelm_fast.stop import Stopped
from maelm_fast.training.hardware import choose_device
from maelm_fast.training.heartbeat import Watch, interval

T = TypeVar("T")
Forward = Callable[..., tuple[Tensor, Tensor]]
"""A model's, or that of what `wrap` put around it."""


class Processes:
    """The processes of a run as one of them sees them. Here: it is alone.

    Whatever all have to do together must be called on each, in the same order."""

    rank, world, strategy = 0, 1, "none"
    group: Any = None
    """What torch.distributed calls them; None: all of them."""

    def __init__(self, device: torch.device) -> None:
        """device: this process's own."""
        self.device = device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def wrap(self, model: nn.Module) -> Forward:
        """What to call in training. Called before the optimiser is made: FSDP2 puts the parameters' parts in their
        place."""
        return model

    def communicating(self, forward: Forward, last: bool) -> contextlib.AbstractContextManager:
        """Around forward and backward of a micro-batch: in an update's last one the gradients, all that were added up,
        become their mean over the processes."""
        return contextlib.nullcontext()

    def total(self, count: int) -> int | Tensor:
        """The sum of everyone's count, at least 1; with several processes 0-d int64 on the device, which the host does
        not wait for."""
        return max(count, 1)

    def sum(self, numbers: Tensor) -> Tensor:
        """The sum of everyone's tensor, of any shape, on its device; it may be the same tensor. The host of a GPU does
        not wait for it."""
        return numbers

    def from_main(self, function: Callable[[], T]) -> T:
        """What the function returns on rank 0, which alone calls it; it can be pickled. Everyone waits for it, and a
        UserError that it raises ends all."""
        return function()

    def everyone(self, value: T) -> list[T]:
        """Everyone's value, in the order of the ranks; it can be pickled."""
        return [value]

    def beside(self) -> Processes:
        """The same processes for a thread beside the training: what that communicates, by `everyone`, meets nothing
        else. Each process makes it."""
        return self

    def whole_model(self, model: MaeLm) -> MaeLm:
        """The model, or a copy with whole parameters where these are in parts: to be called by any process, as often as
        it likes, without the others. Everyone makes it."""
        return model

    def watch(self, directory: Path) -> None:
        """From now on keep a heartbeat in that directory, for the error that names who is missing."""

    def at(self, phase: str, step: int | None = None) -> None:
        """What this process does from now on, for its heartbeat: "waiting for data". step: of that many updates in all,
        the one in hand; None: as before."""


class _Several(Processes):
    """One of several, which torchrun has started."""

    def __init__(self, runtime: RuntimeConfig) -> None:
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous

        super().__init__(choose_device(runtime))
        self.dist = dist
        if self.device.type == "cuda":
            local, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
            require(
                local < there,
                f"more processes on this machine than its {there} GPUs: start torchrun with --nproc-per-node {there}",
            )
            self.device = torch.device("cuda", local)
            torch.cuda.set_device(self.device)
            for name, value in _FLIGHT_RECORDER.items():
                os.environ.setdefault(name, value)
        ours = runtime.parallel.timeout_s
        timeout = timedelta(seconds=ours + 4 * interval(ours))  # the watch, who knows more, speaks first
        try:
            store, self.rank, self.world = next(rendezvous("env://", timeout=timeout))
            store = untouched(store, self.rank, self.world, timeout.total_seconds())
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world, timeout=timeout)
        except (ValueError, RuntimeError) as error:
            text = " ".join(str(error).split())
            raise UserError(f"cannot reach the other processes: {text}; start them with torchrun") from None
        self.strategy = "ddp" if runtime.parallel.strategy == "auto" else runtime.parallel.strategy
        flags = store.clone()  # a client of its own, since the watch is a thread
        grace = 30.0 if self.device.type == "cuda" else 5.0  # in which NCCL writes what it recorded
        self.watcher = Watch(self.rank, self.world, flags, ours, grace)
        if not self.is_main:
            logging.getLogger("maelm_fast").setLevel(logging.ERROR)  # the main one says it for all

    def wrap(self, model: nn.Module) -> Forward:
        if self.strategy == "ddp":
            return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.world,))
        for part in [*(module for module in model.modules() if isinstance(module, Block)), model]:
            fully_shard(part, mesh=mesh, reshard_after_forward=False)
        return model

    @contextlib.contextmanager
    def communicating(self, forward: Forward, last: bool) -> Iterator[None]:
        if isinstance(forward, nn.parallel.DistributedDataParallel):
            with contextlib.nullcontext() if last else forward.no_sync():
                yield
            return
        model: Any = forward
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        model.set_is_last_backward(last)
        yield

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        before = self.watcher.phase
        self.at("waiting for the others")
        yield
        self.at(before)

    def total(self, count: int) -> Tensor:
        here = torch.tensor(count, pin_memory=self.device.type == "cuda").to(self.device, non_blocking=True)
        return self.sum(here).clamp(min=1)

    def sum(self, numbers: Tensor) -> Tensor:
        with self._together():
            self.dist.all_reduce(numbers)
        return numbers

    def from_main(self, function: Callable[[], T]) -> T:
        told: list[Any] = [None, None]
        if self.is_main:
            try:
                told[0] = function()
            except UserError as error:
                told[1] = error
        with self._together():
            self.dist.broadcast_object_list(told, device=torch.device("cpu"))
        if told[1] is not None:
            raise told[1] if self.is_main else SystemExit(2)  # of which one says it
        answer: T = told[0]
        return answer

    def everyone(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.world
        with self._together():
            self.dist.all_gather_object(values, value)
        return values

    def beside(self) -> Processes:
        return _Beside(self)

    def whole_model(self, model: MaeLm) -> MaeLm:
        """A copy under FSDP2, since it would prefetch for a backward pass what was seen in a forward pass, and hang if
        ranks have not seen the same."""
        if self.strategy == "ddp":
            return model
        with torch.device("meta"):
            copy = MaeLm(model.config, model.mask_id)
        copy.load_state_dict({name: whole(tensor) for name, tensor in model.state_dict().items()}, assign=True)
        for name, buffer in model.named_buffers():
            path, _, own = name.rpartition(".")
            copy.get_submodule(path).register_buffer(own, buffer, persistent=False)
        return copy

    def watch(self, directory: Path) -> None:
        self.from_main(lambda: self.watcher.clear(directory))
        self.watcher.directory = directory
        self.watcher.beat()  # one that dies before the first is due was seen all the same

    def at(self, phase: str, step: int | None = None) -> None:
        self.watcher.at(phase, step)

    def is_loss_of_others(self, error: Exception) -> bool:
        """Whether that is what a collective raises when another process has gone or does not come."""
        text = str(error).lower()
        return isinstance(error, self.dist.DistError) or any(
            word in text for word in ("gloo", "nccl", "timed out", "connection closed", "connection reset")
        )


class _Beside(Processes):
    """Several, in a group of their own that passes CPU tensors and objects."""

    def __init__(self, several: _Several) -> None:
        super().__init__(several.device)
        self.rank, self.world, self.dist = several.rank, several.world, several.dist
        self.group = self.dist.new_group(backend="gloo")

    def everyone(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.world
        self.dist.all_gather_object(values, value, group=self.group)
        return values


_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_FLIGHT_RECORDER = {
    "TORCH_FR_BUFFER_SIZE": "2000",  # collectives, of which each rank writes a file when one times out
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}


@contextlib.contextmanager
def processes(runtime: RuntimeConfig, several: bool = True) -> Iterator[Processes]:
    """Those that torchrun's environment tells of; without it, or unless `several`, this one alone. Leaves them again at
    the end of the block.

    A UserError in one process ends all: it is raised in the first one that has one, with its rank, and the others exit
    with status 2 and say nothing. A process that has gone, or that hangs for runtime.parallel.timeout_s, is one too.

    If torchrun itself is killed, its processes get SIGTERM: the run is saved, and free for the next start."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if not several or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Processes(choose_device(runtime))
        return
    group = _Several(runtime)
    watcher = group.watcher
    watcher.start()
    try:
        yield group
    except Stopped:
        watcher.end()
        group.dist.destroy_process_group()
        raise
    except (KeyboardInterrupt, SystemExit):
        watcher.end()
        raise
    except UserError as error:
        if watcher.first_to_fail():
            raise UserError(f"rank {group.rank}: {error}") from None
        raise SystemExit(2) from None
    except Exception as error:
        if group.is_loss_of_others(error):
            missing = watcher.missing()
            if missing and watcher.first_to_fail():
                raise UserError(f"{missing} (rank {group.rank} waited for it)") from None
            raise SystemExit(2) from None
        watcher.first_to_fail()  # no input is to blame: with its traceback, to which PyTorch adds the rank
        raise
    watcher.end()
    group.dist.destroy_process_group()


def untouched(store: Any, rank: int, world: int, timeout_s: float) -> Any:
    """A part of the store that only the processes of this start know; each of them calls it.

    torchrun keeps its store when it starts the processes again, with the addresses of those that are dead, and its
    machines do not agree on how many starts there were (pytorch issue 135712). So each rank asks rank 0 by a name drawn
    at random: what answers to that name is not from before."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    mine, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s
    if rank:
        store.set(f"maelm_fast/asks/{rank}", mine)
        place = store.get(f"maelm_fast/answer/{mine}").decode()
        store.set(f"{place}/has/{rank}", "")
        return PrefixStore(place, store)
    place, missing = f"maelm_fast/start/{mine}", list(range(1, world))
    while missing:
        for other in missing:
            if store.check([f"maelm_fast/asks/{other}"]):  # perhaps a dead one's: again, until the answer has come
                store.set(f"maelm_fast/answer/{store.get(f'maelm_fast/asks/{other}').decode()}", place)
        missing = [other for other in missing if not store.check([f"{place}/has/{other}"])]
        if missing and time.monotonic() > deadline:
            raise RuntimeError(f"no word from rank {', '.join(map(str, missing))} within {timeout_s:.0f} s")
        time.sleep(0.01)
    return PrefixStore(place, store)


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that FSDP2 has in parts over the processes, which all call it; any other as it is."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's part of a tensor that it has whole, where `like` is in parts; else the tensor. On like's device;
    nothing is communicated."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    tensor = tensor.to(like.device)
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def part_of(tensor: Tensor) -> Tensor:
    """What this process has of a tensor in parts, the same memory; any other tensor as it is."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered(part: Tensor, like: Tensor) -> Tensor:
    """The whole of which every process has a part, as it has of `like`, where that is in parts; else the tensor."""
    from torch.distributed.tensor import DTensor

    if not isinstance(like, DTensor):
        return part
    mesh, shape, stride = like.device_mesh, like.shape, like.stride()
    return whole(DTensor.from_local(part, mesh, like.placements, run_check=False, shape=shape, stride=stride))
