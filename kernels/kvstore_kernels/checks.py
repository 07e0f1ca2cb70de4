"""Checks shared by launchers and references, and the integer roundings everything uses."""

from collections.abc import Sequence

import torch

MAX_FP32 = torch.finfo(torch.float32).max


def cdiv(numerator: int, denominator: int) -> int:
    """The smallest integer >= numerator / denominator."""
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is >= value."""
    return cdiv(value, multiple) * multiple


def next_power_of_2(value: int) -> int:
    """The smallest power of two >= value, which is at least 1; Triton's own takes 15 us."""
    return 1 << (value - 1).bit_length()


def expect_bool(name: str, value: object) -> None:
    """Raises: TypeError when `value` is no bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")


def expect_int(name: str, value: object, minimum: int, maximum: int | None = None) -> int:
    """Returns `value` when it is an integer in [minimum, maximum].

    Raises: TypeError when it is no integer (bool counts as none), ValueError when it is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer, got {value!r} of type {type(value).__name__}")
    if value < minimum or (maximum is not None and value > maximum):
        bounds = f">= {minimum}" if maximum is None else f"in [{minimum}, {maximum}]"
        raise ValueError(f"{name}: expected an integer {bounds}, got {value}")
    return value


def expect_shape(name: str, tensor: torch.Tensor, shape: Sequence[int | None]) -> None:
    """Raises TypeError when `tensor` is no tensor, ValueError when its shape differs; None in `shape` admits any."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    got = tensor.shape
    if len(got) == len(shape):
        for want, have in zip(shape, got, strict=True):
            if want != have and want is not None:
                break
        else:
            return
    wanted = ", ".join("any" if want is None else str(want) for want in shape)
    raise ValueError(f"{name}: expected shape [{wanted}], got {list(got)}")


def expect_dtype(name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    """Raises ValueError when the tensor's dtype is none of `dtypes`."""
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: expected dtype {' or '.join(map(str, dtypes))}, got {tensor.dtype}")


def expect_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raises ValueError when the tensor lies on another device."""
    if tensor.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, got one on {tensor.device}")
