"""`torch`, imported when it is first used.

The command line reads the options of every compressor, and answers a wrong one, before torch could have been loaded
(a second on most machines). Modules that it reads take torch from here; an extension may import torch as usual.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _Torch()
