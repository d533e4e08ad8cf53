"""Typical functions and models of torch and transformers, for measuring `graphed` and, in
tests/gpu, for comparing it with eager runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["NAMES", "Work", "make_work"]

NAMES = (
    "mlp",
    "attention",
    "attention with a cache",
    "convolution net",
    "embedding and sampling",
    "UNet block",
    "dropout",
    "Llama",
    "Qwen2",
    "GPT-2",
    "encoder",
)
MODELS = ("Llama", "Qwen2", "GPT-2", "encoder")
"""The names of the works that are models of transformers."""


@dataclass(frozen=True)
class Work:
    """One function, and its arguments: `draw()` makes new ones of the same shapes."""

    name: str
    function: Callable[..., Any]
    draw: Callable[[], tuple[Any, ...]]
    static: tuple[str, ...] = ()
    fresh: Callable[[], tuple[Any, ...]] = field(default=lambda: ())
    """Makes new static arguments, which follow the drawn ones."""


def make_work(name: str) -> Work:
    """Makes one of `NAMES`, with weights from the same seed each time.  Raises ImportError without
    its library."""
    import torch

    torch.manual_seed(0)
    return (_model if name in MODELS else _function)(name, torch)


def _function(name: str, torch: Any) -> Work:
    nn, functional = torch.nn, torch.nn.functional

    def randn(*shape: int, dtype: Any = torch.float32) -> Any:
        return torch.randn(*shape, device="cuda", dtype=dtype)

    if name == "mlp":
        layers = [m for _ in range(4) for m in (nn.Linear(256, 256), nn.GELU())]
        model = nn.Sequential(*layers, nn.Linear(256, 10)).cuda().eval()
        return Work(name, model, lambda: (randn(16, 256),))
    if name == "attention":
        model = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True).cuda().eval()
        return Work(name, model, lambda: (randn(2, 32, 256),))
    if name == "attention with a cache":
        project = nn.Linear(256, 768).cuda()

        def decode(x: Any, place: Any, keys: Any, values: Any) -> Any:
            q, k, v = project(x).view(1, 8, 96).split(32, dim=-1)
            keys.index_copy_(2, place, k.view(1, 8, 1, 32))
            values.index_copy_(2, place, v.view(1, 8, 1, 32))
            mask = torch.arange(128, device="cuda")[None, None, None, :] <= place
            return functional.scaled_dot_product_attention(
                q.view(1, 8, 1, 32), keys, values, attn_mask=mask
            )

        step = [0]

        def draw() -> tuple[Any, ...]:
            step[0] = (step[0] + 1) % 128
            return randn(1, 256), torch.tensor([step[0]], device="cuda")

        def caches() -> tuple[Any, ...]:
            return tuple(torch.zeros(1, 8, 128, 32, device="cuda") for _ in range(2))

        return Work(name, decode, draw, ("keys", "values"), caches)
    if name == "convolution net":
        stack: list[Any] = []
        for width in (3, 16, 32):
            out = 16 if width == 3 else 2 * width
            stack += [nn.Conv2d(width, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()]
            stack += [nn.MaxPool2d(2)]
        net = nn.Sequential(*stack, nn.Flatten(), nn.Linear(64 * 16, 10)).cuda().eval()
        return Work(name, net, lambda: (randn(4, 3, 32, 32),))
    if name == "embedding and sampling":
        table, head = nn.Embedding(1000, 128).cuda(), nn.Linear(128, 1000).cuda()

        def sample(tokens: Any, temperature: float) -> Any:
            logits = head(table(tokens)) / temperature
            best, places = logits.topk(50, dim=-1)
            drawn = torch.multinomial(torch.softmax(best, dim=-1), 1)
            return places.gather(-1, drawn)

        return Work(name, sample, lambda: (torch.randint(0, 1000, (8,), device="cuda"), 0.7))
    if name == "UNet block":
        return Work(
            name,
            _unet_block(torch).cuda().eval(),
            lambda: (randn(2, 32, 16, 16), randn(2, 64)),
        )
    if name == "dropout":
        return Work(name, lambda x: functional.dropout(x, 0.3) * 2 + 1, lambda: (randn(64, 256),))
    raise ValueError(name)


def _unet_block(torch: Any) -> Any:
    nn, functional = torch.nn, torch.nn.functional

    class Block(nn.Module):  # type: ignore[misc, name-defined]
        """Two convolutions with a time embedding, attention over the pixels, and an upsampling."""

        def __init__(self, width: int = 32) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.GroupNorm(8, width) for _ in range(3))
            self.one = nn.Conv2d(width, width, 3, padding=1)
            self.two = nn.Conv2d(width, width, 3, padding=1)
            self.time = nn.Linear(64, width)
            self.qkv = nn.Conv2d(width, 3 * width, 1)
            self.out = nn.Conv2d(width, width, 1)
            self.up = nn.Conv2d(width, width, 3, padding=1)

        def forward(self, x: Any, time: Any) -> Any:
            h = self.one(functional.silu(self.norms[0](x)))
            h = h + self.time(functional.silu(time))[:, :, None, None]
            h = x + self.two(functional.silu(self.norms[1](h)))
            n, c, rows, columns = h.shape
            q, k, v = self.qkv(self.norms[2](h)).flatten(2).transpose(1, 2).chunk(3, dim=-1)
            attended = functional.scaled_dot_product_attention(q, k, v)
            h = h + self.out(attended.transpose(1, 2).reshape(n, c, rows, columns))
            return self.up(functional.interpolate(h, scale_factor=2.0, mode="nearest"))

    return Block()


def _model(name: str, torch: Any) -> Work:
    import transformers

    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8}
    sizes |= {"vocab_size": 1000, "intermediate_size": 512}
    decoders = sizes | {"num_key_value_heads": 4, "use_cache": False}
    config: Any
    model: Any
    if name == "Llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**decoders))
    elif name == "Qwen2":
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**decoders))
    elif name == "GPT-2":
        config = transformers.GPT2Config(
            n_embd=256, n_layer=2, n_head=8, vocab_size=1000, use_cache=False
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        model = transformers.BertModel(transformers.BertConfig(**sizes))
    model = model.to("cuda", torch.bfloat16).eval()
    return Work(name, model, lambda: (torch.randint(0, 1000, (2, 16), device="cuda"),))
