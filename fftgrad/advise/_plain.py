"""Results as JSON has them."""

import math
from collections.abc import Mapping
from typing import Any, cast

import numpy as np


def plain(value: Any) -> Any:
    """The same in dicts, lists and numbers; None for one that is not finite."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(k): plain(one) for k, one in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, np.ndarray | np.generic):
        value = cast("Any", value).tolist()
    if isinstance(value, list | tuple):
        return [plain(one) for one in cast("list[Any]", value)]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else repr(value)
