"""What numba kernels are given."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt


def frozen(*arrays: npt.NDArray[Any]) -> Any:
    """The arrays, read-only: numba compiles once for those, and once more for others."""
    views = [array.view() for array in arrays]
    for view in views:
        view.flags.writeable = False
    return views
