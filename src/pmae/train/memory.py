"""Out of memory, told as the batch to try instead."""

import contextlib
from collections.abc import Iterator

import torch

from pmae.errors import UserError

HOST = ("can't allocate memory", "not enough memory")
"""How torch words it for the host's memory, where it has no exception of its own."""


class OutOfMemory(UserError):
    """A batch is too large for the memory there is."""


@contextlib.contextmanager
def memory_errors(batch_size: int, device: torch.device) -> Iterator[None]:
    """Name the batch size that failed and half of it, the next that fits where memory grows with the batch."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not (isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in str(error) for words in HOST)):
            raise
        smaller = max(batch_size // 2, 1)
        advice = f"{smaller} would take half of the memory" if smaller < batch_size else "make the encoder smaller"
        raise OutOfMemory(
            f"train.batch_size must fit in the memory of {device}, got {batch_size}, which does not; {advice}"
        ) from error
