"""Evaluation on several ranks as one process would do it: on the dataset's rows alone, with the loss of all ranks' rows.

Accelerate gives each rank as many rows as the others, and fills the last batch with rows from the beginning. Here each rank
leaves those out: the rows of the last batch are on the first ranks, and a rank that has none runs a row that counts nothing,
since forwards gather parameters together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import find_batch_size, recursively_apply

from .. import comm

Step = Callable[..., tuple[torch.Tensor | None, Any, Any]]


class OwnRows:
    """A prepared data loader whose batches lack the rows that were repeated to fill the last one."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.spare: Any = None  # where this rank has no row of the batch: one to run all the same

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            loaded = find_batch_size(batch) or 0
            kept = self._own(loaded)
            self.spare = first_rows(batch, loaded, 1) if kept == 0 < loaded else None
            yield batch if kept == loaded else first_rows(batch, loaded, kept)

    def _own(self, loaded: int) -> int:
        """How many of this rank's `loaded` rows are not repeated."""
        state = getattr(self._loader, "gradient_state", None)  # the user's own loader may have none
        if state is None or not state.end_of_dataloader or state.remainder <= 0:
            return loaded
        return min(loaded, max(0, state.remainder - comm.world().rank * loaded))


def first_rows(batch: Any, rows: int, kept: int) -> Any:
    """The first `kept` rows of tensors and lists of `rows` rows, in dicts, lists and tuples; anything else as it is."""
    if isinstance(batch, torch.Tensor):
        return batch[:kept] if batch.dim() and batch.size(0) == rows else batch
    if isinstance(batch, Mapping):
        made = {key: first_rows(value, rows, kept) for key, value in batch.items()}
        return made if type(batch) is dict else type(batch)(made)  # type: ignore[call-arg]
    if isinstance(batch, tuple):
        parts = [first_rows(each, rows, kept) for each in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    if isinstance(batch, list):
        is_rows = len(batch) == rows and not any(isinstance(each, torch.Tensor) for each in batch)
        return batch[:kept] if is_rows else [first_rows(each, rows, kept) for each in batch]
    return batch


@contextmanager
def exact_evaluation(trainer: Any, loader: OwnRows) -> Iterator[None]:
    """In the block, `trainer.prediction_step` returns the loss of all ranks' rows, and the predictions of this rank's.

    Whatever class has overridden the step, and the function that prepares its logits: both get one row at least.
    """
    step, prepare = trainer.prediction_step, trainer.preprocess_logits_for_metrics

    def exact_step(model: Any, inputs: Any, *args: Any, **options: Any) -> tuple[torch.Tensor | None, Any, Any]:
        has_rows = loader.spare is None
        ran = inputs if has_rows else loader.spare
        with own_average(trainer.args):
            loss, logits, labels = step(model, ran, *args, **options)
        if isinstance(labels, list) and comm.world().size > 1:
            raise ValueError(
                f"ShardedTrainer on rank {comm.world().rank}: labels that are lists, as those of object detection, cannot be "
                "gathered from the ranks: evaluate with prediction_loss_only=True, or in one process"
            )
        if loss is not None:
            loss = _loss_of_all(loss, _counted(trainer, ran) if has_rows else 0)
        return (loss, logits, labels) if has_rows else (loss, first_rows(logits, 1, 0), first_rows(labels, 1, 0))

    def prepare_some(logits: Any, labels: Any) -> Any:
        if loader.spare is None:
            return prepare(logits, labels)
        rows = (recursively_apply(lambda tensor: tensor.new_zeros(1, *tensor.shape[1:]), each) for each in (logits, labels))
        return first_rows(prepare(*rows), 1, 0)

    trainer.prediction_step = exact_step
    if prepare is not None:
        trainer.preprocess_logits_for_metrics = prepare_some
    try:
        yield
    finally:
        del trainer.prediction_step  # the class has it
        trainer.preprocess_logits_for_metrics = prepare


@contextmanager
def own_average(args: Any) -> Iterator[None]:
    """In the block, the Trainer neither counts all ranks' tokens nor multiplies a loss by the number of ranks."""
    before = args.average_tokens_across_devices
    args.average_tokens_across_devices = False
    try:
        yield
    finally:
        args.average_tokens_across_devices = before


def _counted(trainer: Any, inputs: Any) -> int:
    """What a loss is the mean over, as far as inputs tell: labels that are not ignored; rows, where there are none."""
    shifted = inputs.get("shift_labels") if isinstance(inputs, Mapping) else None
    labels = inputs.get("labels") if isinstance(inputs, Mapping) and shifted is None else shifted
    if not isinstance(labels, torch.Tensor):
        return find_batch_size(inputs) or 1
    if shifted is None and trainer._loss_shifts_labels:
        labels = labels[..., 1:]
    return int(labels.ne(-100).sum())


def _loss_of_all(loss: torch.Tensor, count: int) -> torch.Tensor:
    """The mean of the ranks' losses, each as often as it counts. Collective."""
    wide = loss.detach().mean().double()
    total, counts = comm.world().sum(wide * count if count else torch.zeros_like(wide), float(count))
    return (total / counts.to(total.device)).to(loss.dtype)
