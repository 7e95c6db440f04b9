"""The process group, the device of this process, and how the model is cut over the processes."""

import contextlib
import enum
import faulthandler
import functools
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._triton import has_triton
from torch.utils.checkpoint import checkpoint

from trainer.config import TrainerConfig
from trainer.estimate import Gathered

# What is called of a model, so that its weights must be ready there.
METHODS = ("forward", "supervised_loss", "supervised_scores", "plain_logits")
START_SECONDS = 7200  # that ranks wait for one another until the first step has ended: some may download or compile
WATCHDOG_SHARE = 1.2  # of `hang_seconds`


class Wish(enum.IntEnum):
    """What can be asked of a run between two steps. Where ranks were asked for different things, the greatest counts."""

    NOTHING = 0
    SAVE = 1
    LEAVE = 2  # save and leave


@dataclass
class World:
    """This process among all: `rank` of `size`, and what it was asked for."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    asked: Callable[[], Wish]  # since the last call
    on_leave: list[Callable[[], None]] = field(default_factory=list)  # called when this process leaves, however it does
    watchdog: "Watchdog | None" = None
    _flag: "Reading | None" = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def runs_ahead(self) -> bool:
        """Whether work is queued on the device while earlier work runs: reading its latest result would empty the queue."""
        return self.device.type == "cuda"

    def wish(self) -> Wish:
        """What all ranks do after this step, as any was asked to: the same on all of them. A collective.

        The answer is of the question one call before, so that a GPU never waits for the reduction it has just started.
        """
        before = self._flag
        if before is None:
            self._shorten_timeouts()
        flag = torch.full((1,), float(self.asked()), device=self.device)  # a copy from the CPU would wait
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        self._flag = Reading(flag)
        wish = Wish.NOTHING if before is None else Wish(int(before.values()[0]))
        self.alive()
        return wish

    def _shorten_timeouts(self) -> None:
        """After the first step nothing is downloaded or compiled any more: a partner that is waited for as long as a step may take is gone.

        The watchdog comes a little later, so that a rank that waits can say for what.
        """
        if self.watchdog:
            _set_pg_timeout(timedelta(seconds=self.watchdog.seconds))

    def now(self) -> Any:
        """The moment when the device has done what it was given so far, for `seconds_between`."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def alive(self) -> None:
        """Tells the watchdog that this process goes on: another such piece of work must end within its time."""
        if self.watchdog:
            self.watchdog.arm()

    def sum(self, *values: float) -> list[float]:
        """Each value summed over all ranks. A collective."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def sum_later(self, value: torch.Tensor) -> "Reading":
        """The scalar summed over all ranks, without waiting for it. A collective."""
        total = value.detach().double().reshape(1)
        dist.all_reduce(total)
        return Reading(total)

    def main_first(self, work: Callable[[], Any]) -> Any:
        """What `work` returns on rank 0, on every rank. A collective; an error there is raised everywhere."""
        outcome: list[Any] = [None, None]
        if self.is_main:
            try:
                outcome[0] = work()
            except Exception as error:  # every rank must learn of it, or the others wait for ever
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0, device=self.device)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]


def seconds_between(earlier: Any, later: Any) -> float:
    """Seconds from one moment of `World.now` to another, which the device must have reached."""
    return later - earlier if isinstance(later, float) else earlier.elapsed_time(later) / 1000


class Reading:
    """A small tensor on its way to the CPU; `values` waits for it alone, not for what has been queued since."""

    def __init__(self, tensor: torch.Tensor):
        self._host = tensor.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.current_stream().record_event() if tensor.is_cuda else None

    def values(self) -> list[float]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.flatten().tolist()


class Watchdog:
    """Ends this process when a step, a save or a held-out batch takes longer than any may: a partner is gone, or a device hangs.

    Its death is what Ray notices, which then starts all workers again from the last checkpoint. Armed after the first
    step, which with its compilation has all the time it needs.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.deadline = math.inf
        threading.Thread(target=self._watch, daemon=True).start()

    def arm(self) -> None:
        self.deadline = time.monotonic() + WATCHDOG_SHARE * self.seconds

    def rest(self) -> None:
        self.deadline = math.inf

    def _watch(self) -> None:
        while True:
            time.sleep(min(1.0, self.seconds / 10))
            if time.monotonic() > self.deadline:
                print(
                    f"nothing done within {self.seconds:g} seconds (hang_seconds): this worker ends, so that all start again",
                    file=sys.stderr,
                )
                faulthandler.dump_traceback(all_threads=True)
                os._exit(1)


@contextlib.contextmanager
def join_world(asked: Callable[[], Wish]) -> Iterator[World]:
    """Joins the process group: Ray Train's where it made one, torchrun's where RANK is set, else a group of one."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if dist.is_initialized() and device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    own = not dist.is_initialized()
    if own:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        alone = {} if "RANK" in os.environ else {"store": HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, timeout=timedelta(seconds=START_SECONDS), **alone)
    size = dist.get_world_size()
    world = World(dist.get_rank(), size, device, init_device_mesh(device.type, (size,)), asked)
    try:
        yield world
    finally:
        if world.watchdog:
            world.watchdog.rest()
        for leave in world.on_leave:
            leave()
        if own:
            dist.destroy_process_group()


def compute_type(config: TrainerConfig, device: torch.device) -> torch.dtype:
    """Type of activations and gathered weights; master weights are float32 whatever it is."""
    if config.precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.float32 if config.precision == "float32" else torch.bfloat16


def blocks(model: Any) -> list[nn.Module]:
    """The modules that the model's author says must not be split: its layers."""
    return [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]


def compile_blocks(model: Any, config: TrainerConfig, device: torch.device) -> None:
    """Has each block and the final norm compiled when they first run; FSDP's hooks stay outside.

    All blocks share the code, so one is compiled and serves all.
    """
    able = device.type == "cuda" and has_triton() and any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang")))
    if not (able if config.compile is None else config.compile):
        return
    norms = [child for child in model.base_model.children() if {p.ndim for p in child.parameters()} == {1}]
    for module in [*blocks(model), *norms]:
        module.forward = torch.compile(module.forward, dynamic=False)
    model.is_compiled = True


def recompute(model: Any, count: int) -> None:
    """Has the first `count` blocks keep nothing for the backward pass but what they were given."""

    def contexts() -> tuple[Any, Any]:
        return contextlib.nullcontext(), model.computing()  # the backward pass runs outside the model

    for module in blocks(model)[:count]:
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False, context_fn=contexts)


def shard(model: Any, world: World, dtype: torch.dtype, gathered: Gathered = "pass") -> Any:
    """Gives a model on the meta device memory for this rank's part of it: its shards, block by block, or alone all of it.

    Parameters are float32 and the computation is of type `dtype`; gradients are reduced in float32. `model.computing()`
    is what a block must run in where nobody else sees to its parameters' type, `model.gathered` how long weights stay so.
    """
    model.copies, model.computing, model.gathered = None, contextlib.nullcontext, gathered
    if world.size == 1:
        materialize(model, world.device)
        model.tie_weights()  # which lost each other on their way from the meta device
        if dtype != torch.float32:
            model.copies = Copies(model, dtype)
            model.computing = model.copies.in_place
            for name in METHODS:
                setattr(model, name, _within(model.computing, getattr(model, name)))
        return model
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in blocks(model):
        fully_shard(module, mesh=world.mesh, mp_policy=policy, reshard_after_forward=gathered == "block")
    fully_shard(model, mesh=world.mesh, mp_policy=policy)
    for name in METHODS[1:]:
        register_fsdp_forward_method(model, name)
    materialize(model, world.device)
    return model


class Copies:
    """A model's float32 parameters once more, in the type that it computes in; the modules hold them while `in_place`.

    It stands in for FSDP where there is nobody to share with: that would copy weights and gradients three times more.
    Gradients are summed in float32 where the optimizer looks for them, in the parameters' own `grad`.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self.dtype = dtype
        self.parameters = [parameter for parameter in model.parameters() if parameter.dtype != dtype]
        self.copies: list[nn.Parameter] = []
        self.fresh = False
        places = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        self.slots = [
            (module._parameters, name, places[id(parameter)])
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in places
        ]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        self._refresh()
        before = [holder[name] for holder, name, _ in self.slots]
        for holder, name, number in self.slots:
            holder[name] = self.copies[number]
        try:
            yield
        finally:
            for (holder, name, _), parameter in zip(self.slots, before, strict=True):
                holder[name] = parameter

    def _refresh(self) -> None:
        if not self.copies:
            self.copies = [nn.Parameter(p.detach().to(self.dtype), requires_grad=p.requires_grad) for p in self.parameters]
            for copy, parameter in zip(self.copies, self.parameters, strict=True):
                if copy.requires_grad:
                    copy.register_post_accumulate_grad_hook(functools.partial(_hand_over, parameter))
        elif not self.fresh:
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
                [copy.detach() for copy in self.copies], [p.detach() for p in self.parameters]
            )
        self.fresh = True


def _hand_over(parameter: nn.Parameter, copy: torch.Tensor) -> None:
    """Adds a copy's gradient to the parameter's."""
    assert copy.grad is not None
    if parameter.grad is None:
        parameter.grad = copy.grad.float()
    else:
        parameter.grad.add_(copy.grad)
    copy.grad = None


def _within(context: Callable[[], Any], method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def inside(*arguments: Any, **named: Any) -> Any:
        with context():
            return method(*arguments, **named)

    return inside


def begin_pass(model: Any, last: bool) -> None:
    """Before each of a step's micro-batches: until the `last`, weights that stay for a step are kept and gradients not reduced."""
    if model.gathered == "step" and isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)


def weights_changed(model: Any) -> None:
    """Has the next forward pass see what the optimizer has done."""
    if model.copies:
        model.copies.fresh = False


def free_gathered(model: nn.Module) -> None:
    """Back to shards after forward passes without a backward one, which may have left weights gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def own_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """This rank's rows of a tensor, which share its memory, and the number of the first; all of them where it is not sharded."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), 0
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local().detach()[: shape[0]], offset[0] if shape[0] else 0


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor. A collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def materialize(model: nn.Module, device: torch.device) -> None:
    """Gives parameters memory without values, and buffers their computed values (rotary frequencies) on `device`."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
