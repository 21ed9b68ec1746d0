"""One worker in PyTorch: DistributedDataParallel over gloo, with the hooks that come with it.

The models are twins of those in `tasks.py`, with submodules named as Flax names them, so that the
same file of parameters fits both.
"""
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

import datetime
import os
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from job import Framework, Job, work
from tasks import TASKS, Task
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

BUCKET_MB = 1024  # PowerSGD crashes on gloo where there is more than one bucket


class Layer(nn.Module):
    """The twin of `train_lm.Layer`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 32)
        self.LayerNorm_0 = nn.LayerNorm(width, eps=1e-6, bias=False)
        self.Dense_0 = nn.Linear(width, 3 * width, bias=False)
        self.Dense_1 = nn.Linear(width, width, bias=False)
        self.LayerNorm_1 = nn.LayerNorm(width, eps=1e-6, bias=False)
        self.Dense_2 = nn.Linear(width, 4 * width, bias=False)
        self.Dense_3 = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Any) -> Any:  # (B, T, D) -> (B, T, D)
        batch, length, width = x.shape
        qkv = self.Dense_0(self.LayerNorm_0(x)).reshape(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, D/H)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.Dense_1(y.transpose(1, 2).reshape(batch, length, width))
        y = F.gelu(self.Dense_2(self.LayerNorm_1(x)), approximate="tanh")
        return x + self.Dense_3(y)


class ByteLM(nn.Module):
    """The twin of `train_lm.ByteLM`."""

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(context, width))
        self.Embed_0 = nn.Embedding(256, width)
        self.layers = [f"Layer_{index}" for index in range(layers)]
        for name in self.layers:
            self.add_module(name, Layer(width))
        self.LayerNorm_0 = nn.LayerNorm(width, eps=1e-6, bias=False)
        self.Dense_0 = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Any) -> Any:  # (B, T) -> (B, T, 256)
        x = self.Embed_0(tokens) + self.position
        for name in self.layers:
            x = getattr(self, name)(x)
        return self.Dense_0(self.LayerNorm_0(x))


def twin(task: Task, path: str) -> Any:
    """The task's model in PyTorch, with the parameters of a file."""
    model: Any = task.model
    shape = task.held_out[0][0].shape
    out = ByteLM(model.width, model.layers, shape[1])
    with np.load(path) as archive:
        names = {name: name.removeprefix("params/").replace("/", ".") for name in archive.files}
        state = {
            _renamed(new): torch.from_numpy(_turned(new, archive[old]))
            for old, new in names.items()
        }
    out.load_state_dict(state)
    return out


def _renamed(name: str) -> str:
    for flax in (".kernel", ".scale", ".embedding"):
        name = name.replace(flax, ".weight")
    return name


def _turned(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Flax multiplies from the left."""
    return np.ascontiguousarray(array.T if name.endswith(".kernel") else array)


def prepare(job: Job) -> Framework:
    """The model under DistributedDataParallel, with the hook of the method."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    host, _, port = job.coordinator.partition(":")
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{host}:{port}",
        rank=job.worker,
        world_size=job.workers,
        timeout=datetime.timedelta(seconds=600),
    )
    task = TASKS["large"](job.smoke)
    powersgd = job.method == "torch-powersgd"
    if powersgd:
        dist._DEFAULT_FIRST_BUCKET_BYTES = BUCKET_MB * 2**20
    extra = {"bucket_cap_mb": BUCKET_MB} if powersgd else {}
    model = DistributedDataParallel(twin(task, job.params), **extra)
    if powersgd:
        state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.Adam(model.parameters(), task.rate, (0.9, 0.99), fused=True)
    batches, rates = task.batches((job.seed, job.worker), 1), task.schedule(task.rate, job.steps)
    held: dict[str, Any] = {}

    def loss(logits: Any, labels: Any) -> Any:
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())

    def backward(inputs: Any, labels: Any) -> None:
        optimizer.zero_grad(set_to_none=False)
        held["loss"] = loss(model(inputs), labels)
        held["loss"].backward()

    def tensors(batch: Any) -> list[Any]:
        return [torch.from_numpy(np.ascontiguousarray(x, np.int64)) for x in batch]

    def finish(rate: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()

    def step(number: int) -> dict[str, float]:
        backward(*tensors(next(batches)))
        finish(float(rates(number)))
        return {}

    facts = {"parameters": sum(p.numel() for p in model.parameters())}
    return Framework(step, lambda: float(held["loss"]), dist.barrier, facts)


if __name__ == "__main__":
    work(Job.loads(sys.argv[1]), prepare)
    os._exit(0)  # gloo sometimes aborts while it is taken down
