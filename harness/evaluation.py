"""Evaluation leaves no trace: modules, buffers and random numbers go on as if there had been none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from harness.implementation import EvaluationOutput
from harness.workload import Batch, MicroBatch

_NEEDS_AUTOGRAD = "does not require grad"


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """`models` are in evaluation mode, and autograd records nothing. Afterwards each of their modules is in the mode it
    was in before and holds the buffers it held, with the values they had, and torch's random numbers go on from where
    they were."""
    modules = list(dict.fromkeys(module for model in models for module in model.modules()))
    modes = [module.training for module in modules]
    held = [(module, name, buffer) for module in modules for name, buffer in module._buffers.items()]
    values = {buffer: buffer.clone() for _, _, buffer in held if buffer is not None}
    with torch.random.fork_rng(devices=_accelerators(models)), torch.no_grad():
        try:
            for model in models:
                model.eval()
            yield
        except RuntimeError as error:
            if _NEEDS_AUTOGRAD not in str(error):
                raise
            raise RuntimeError(
                f"an evaluation runs without gradients: expected torch.enable_grad() around those that the model takes "
                f"in its forward, got: {error}"
            ) from error
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode
            for module, name, buffer in held:
                module._buffers[name] = buffer  # a forward may have put another tensor there
            for buffer, value in values.items():
                buffer.copy_(value)


def sum_losses(batch: Batch, loss_sum: Callable[[MicroBatch], Tensor], device: torch.device) -> EvaluationOutput:
    """What `loss_sum` gives for each micro-batch of this rank's share, in fp64, and their targets."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for micro_batch in batch.micro_batches:
        total += loss_sum(micro_batch)
    return EvaluationOutput(loss_sum=total, num_tokens=batch.num_tokens)


def _accelerators(models: tuple[nn.Module, ...]) -> list[torch.device]:
    """The devices, beside the CPU, whose random numbers a forward may draw."""
    tensors = (tensor for model in models for tensor in (*model.parameters(), *model.buffers()))
    return sorted({tensor.device for tensor in tensors if tensor.device.type == "cuda"}, key=str)
