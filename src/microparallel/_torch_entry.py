"""What torch runs when it is imported: it learns the name of our backend, and nothing of ours is loaded.

torch calls `register` through the entry point `torch.backends`, and gives up importing itself if that raises. So there
is next to nothing here: the backend is imported when a program first asks for it.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any


def register() -> None:
    """Make `torch.distributed.init_process_group("microparallel")` known."""
    distributed = sys.modules.get("torch.distributed.distributed_c10d")  # not there in builds without distributed
    if distributed is not None:
        with contextlib.suppress(Exception):  # whatever it is, `import torch` matters more
            distributed.Backend.register_backend("microparallel", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, _backend_options: Any = None) -> Any:
    from microparallel.torch_backend.group import create

    return create(options)
