"""transformers: `model.generate` with graphed steps, or, for Llama, Mistral, Qwen2 and Qwen3, by
ostinato's own decoder.

from ostinato.interop.transformers import accelerate, graph_generate

with graph_generate(model) as steps:
    model.generate(**inputs, max_new_tokens=128)      # as before, each step a replay
    print(steps.explain())
with accelerate(model) as accelerated:
    model.generate(**inputs, max_new_tokens=128)      # by its kernels, on the model's weights
    print(accelerated.statistics())
model.generate(**inputs)                              # transformers' own again
"""

from __future__ import annotations

from ostinato.errors import NotAvailableError

try:
    import torch  # noqa: F401
    from transformers.cache_utils import DynamicSlidingWindowLayer  # noqa: F401
except ImportError as error:
    raise NotAvailableError(
        f"transformers or PyTorch is not installed ({error}); install both"
    ) from error

from ostinato.interop.transformers.accelerating import (
    Accelerated,
    AcceleratedStatistics,
    accelerate,
)
from ostinato.interop.transformers.graphing import GraphedModel, graph_generate

__all__ = ["Accelerated", "AcceleratedStatistics", "GraphedModel", "accelerate", "graph_generate"]
