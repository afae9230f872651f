"""Images cut into patches and put together again."""

from torch import Tensor


def patch_sides(patch: int, height: int) -> tuple[int, int]:
    """Rows and columns of a patch: a square, but one row high where the image is one row (a signal or a vector)."""
    return (1 if height == 1 else patch), patch


def patchify(x: Tensor, patch: int) -> Tensor:
    """(B, C, H, W) to (B, N, numbers of a patch), channels last within a patch."""
    batch, channels, height, width = x.shape
    rows, columns = patch_sides(patch, height)
    x = x.reshape(batch, channels, height // rows, rows, width // columns, columns)
    return x.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def unpatchify(patches: Tensor, patch: int, shape: tuple[int, int, int]) -> Tensor:
    """The inverse of `patchify`."""
    channels, height, width = shape
    rows, columns = patch_sides(patch, height)
    x = patches.unflatten(1, (height // rows, width // columns)).unflatten(3, (rows, columns, channels))
    return x.permute(0, 5, 1, 3, 2, 4).reshape(-1, channels, height, width)
