"""`generate` of small causal models of transformers, in `graph_generate`.

    python -m benchmarks.torch_generate [--models Llama,Gemma2] [--tokens N] [--calls N] [--out DIR]

Each model has two or three small layers with random float32 weights; nothing is loaded.  Its tokens
by `graph_generate` are compared with those of transformers' own `generate` over the same kind of
cache, greedy and sampled, with prompts padded on the left and without padding, and again after its
weights were changed in place: `answers` counts the calls by whether they are equal in every token.
`as_plain` is the part of all tokens that are also those of `generate` with its default cache,
whose attention may round otherwise.  `replayed` is the part of the steps after the first token
that were replays; `how` says what the others were.  Times are those of whole calls for a padded
batch of two, the prompt included, in turns; `graphed_tokens_per_s` is beside `generate` over a
static cache (`static_…`), which computes the same, and with its default cache (`eager_…`).  There
is no bound by hand; the last figure of `benchmarks.generate` bounds a step by an empty one.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import ostinato as ost
from benchmarks import common

_LAYERS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_USUAL = {**_LAYERS, "intermediate_size": 96, "max_position_embeddings": 512}
_GROUPED = {**_USUAL, "num_key_value_heads": 2}
_HEADS = {**_GROUPED, "head_dim": 16}
_WINDOW = {"sliding_window": 24}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
_SHORT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
_STATES = {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", _GROUPED),
    "Mistral": ("Mistral", {**_GROUPED, **_WINDOW}),
    "Mixtral": ("Mixtral", {**_GROUPED, "num_local_experts": 4}),
    "Qwen2": ("Qwen2", _GROUPED),
    "Qwen3": ("Qwen3", _HEADS),
    "Gemma": ("Gemma", _HEADS),
    "Gemma2": ("Gemma2", {**_HEADS, **_WINDOW, **_MIXED}),
    "Gemma3": ("Gemma3Text", {**_HEADS, **_WINDOW, **_MIXED}),
    "gpt-oss": ("GptOss", {**_HEADS, **_WINDOW, **_MIXED, "num_local_experts": 4}),
    "Phi": ("Phi", _USUAL),
    "Phi3": ("Phi3", _GROUPED),
    "GPT-2": ("GPT2", _SHORT),
    "GPT-NeoX": ("GPTNeoX", _USUAL),
    "GPT-J": ("GPTJ", {**_SHORT, "rotary_dim": 8}),
    "OPT": ("OPT", {**_LAYERS, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "Bloom": ("Bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "Falcon": ("Falcon", {**_LAYERS, "alibi": False}),
    "MPT": ("Mpt", {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 512}),
    "Mamba": ("Mamba", _STATES),
    "Mamba2": ("Mamba2", {**_STATES, "num_heads": 8, "head_dim": 16, "n_groups": 1}),
    "StableLM": ("StableLm", _GROUPED),
    "Cohere": ("Cohere", _GROUPED),
    "Cohere2": ("Cohere2", {**_GROUPED, **_WINDOW, **_MIXED}),
    "OLMo": ("Olmo", _GROUPED),
    "OLMo2": ("Olmo2", _GROUPED),
    "Granite": ("Granite", _GROUPED),
    "StarCoder2": ("Starcoder2", _GROUPED),
    "SmolLM3": ("SmolLM3", _GROUPED),
}
"""For each model the first part of the names of its classes, and values of its configuration."""
_CLASSES = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}
_ROWS = [[5, 99, 130, 2, 7, 45, 17, 61], [0, 0, 0, 88, 31, 60, 3, 12]]
Settings = tuple[str, int, dict[str, Any]]
CALLS: tuple[Settings, ...] = (
    ("greedy, padded", 2, {"do_sample": False}),
    ("sampled, padded", 2, {"do_sample": True, "top_k": 40, "temperature": 0.9}),
    ("greedy, one prompt", 1, {"do_sample": False}),
    ("sampled, one prompt", 1, {"do_sample": True}),
)
"""Calls with new random numbers each; the number is that of the prompts."""


def small(name: str, where: str) -> Any:
    """Makes one of `MODELS` with random weights, whose tokens depend on all of the prompt.  Raises
    AttributeError if transformers does not have it."""
    import torch
    import transformers

    kind, values = MODELS[name]
    torch.manual_seed(3)
    tokens = {"vocab_size": 257, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    # Tied to the embeddings, the output would say the last token again.
    config = getattr(transformers, f"{kind}Config")(**tokens, **values, tie_word_embeddings=False)
    model: Any = getattr(transformers, _CLASSES.get(kind, f"{kind}ForCausalLM"))(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.2)
    model.generation_config.eos_token_id = None
    model.generation_config.use_cache = True  # MPT's says that it is not
    return model.to(where)


def call(model: Any, tokens: int, settings: Settings, seed: int = 0, **options: Any) -> Any:
    """Calls `generate`; returns the tokens after the prompt."""
    import torch

    _, batch, how = settings
    ids = torch.tensor(_ROWS[:batch], device=model.device)
    torch.manual_seed(seed)
    given = {"attention_mask": (ids != 0).long(), "max_new_tokens": tokens, **how, **options}
    return model.generate(ids, **given)[:, ids.shape[1] :]


STATIC = {"cache_implementation": "static", "disable_compile": True}


def compared(model: Any, tokens: int, seed: int) -> tuple[dict[str, int], list[float]]:
    """Compares calls of a model in `graph_generate` with transformers' own over a static cache.
    Returns counts of the calls by their outcome, and for each call the part of its tokens that are
    those of `generate` with its default cache."""
    import torch

    answers: Counter[str] = Counter()
    plain = []
    for settings in CALLS:
        ours = call(model, tokens, settings, seed)
        wanted = call(model, tokens, settings, seed, **STATIC)
        default = call(model, tokens, settings, seed, cache_implementation="dynamic")
        answers["equal" if torch.equal(ours, wanted) else f"{settings[0]}: WRONG"] += 1
        plain.append((ours == default).float().mean().item())
    return dict(answers), plain


def change_weights(model: Any) -> None:
    """Changes all matrices in place: their rows change places."""
    import torch

    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.copy_(weight.roll(1, 0))


def outcome(steps: Any) -> dict[str, object]:
    """Returns what was made of the steps so far."""
    numbers, passed_on = steps.step.statistics(), steps.passed_on
    eager = numbers.eager + sum(passed_on.values())
    reasons = [f"{key.decision} {key.reason}".strip() for key in numbers.keys]
    reasons += [f"{count} passed on: {reason}" for reason, count in passed_on.items()]
    return {
        "replayed": round(numbers.replays / max(1, numbers.replays + eager), 3),
        "captures": numbers.captures,
        "rebound": numbers.rebound,
        "eager": eager,
        "how": "; ".join(dict.fromkeys(reasons))[:700],
    }


def rates(
    ways: Mapping[str, Callable[[], Any]], synchronize: Callable[[], object], calls: int
) -> dict[str, float]:
    """Times ways in turns; returns the tokens a second of each, from the median of its calls."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    count = 1
    for _ in range(calls):
        for way, run in ways.items():
            synchronize()
            began = time.perf_counter()
            count = run().numel()
            synchronize()
            times[way].append(time.perf_counter() - began)
    return {way: count / statistics.median(found) for way, found in times.items()}


def measure(torch: Any, name: str, where: str, tokens: int, calls: int) -> dict[str, object]:
    """Compares and times one model."""
    from ostinato.interop.transformers import graph_generate

    model = small(name, where)
    with graph_generate(model) as steps:
        began = time.perf_counter()
        answers, plain = compared(model, tokens, 1)
        first = time.perf_counter() - began
        change_weights(model)
        again, more = compared(model, tokens, 2)
        total = dict(Counter(answers) + Counter(again))
        row: dict[str, object] = {"model": name, "answers": total}
        row["as_plain"] = round(statistics.mean(plain + more), 4)
        row["first_s"] = round(first, 2)
        found = rates(
            {
                "eager": lambda: call(model, tokens, CALLS[0], cache_implementation="dynamic"),
                "static": lambda: call(model, tokens, CALLS[0], **STATIC),
                "graphed": lambda: call(model, tokens, CALLS[0]),
            },
            torch.cuda.synchronize,
            calls,
        )
        row |= {f"{way}_tokens_per_s": round(rate, 1) for way, rate in found.items()}
        row["times_static"] = round(found["graphed"] / found["static"], 2)
        row["times_eager"] = round(found["graphed"] / found["eager"], 2)
        return row | outcome(steps)


def main() -> int:
    parser = common.options(__doc__)
    parser.add_argument("--models", default="", help="some of them, with commas between")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--calls", type=int, default=4)
    chosen = parser.parse_args()
    torch = common.torch_with_cuda(chosen.device)
    if torch is None:
        return 0
    try:
        import transformers
    except ImportError as error:
        print(f"not measured: {error}; install transformers")
        return 0
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    device = ost.open_device(chosen.device)
    rows: list[dict[str, object]] = []
    skipped: dict[str, str] = {}
    calls = 1 if chosen.quick else chosen.calls
    for name in tuple(filter(None, chosen.models.split(","))) or MODELS:
        try:
            rows.append(measure(torch, name, "cuda", chosen.tokens, calls))
            print(rows[-1], flush=True)
        except Exception as error:
            skipped[name] = f"{type(error).__name__}: {str(error)[:300]}"
            print(name, skipped[name], flush=True)
    columns = ("model", "eager_tokens_per_s", "static_tokens_per_s", "graphed_tokens_per_s")
    print(common.table("generate", rows, (*columns, "replayed", "as_plain", "answers")))
    right = [row for row in rows if row["answers"] == {"equal": 2 * len(CALLS)}]
    times = [float(str(row["times_eager"])) for row in rows]
    common.emit(
        "torch_generate",
        device,
        chosen.out,
        ceiling={"what": "none by hand: transformers' loop on the host bounds a step"},
        settings={
            "tokens": chosen.tokens,
            "calls": calls,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        rows=rows,
        skipped=skipped,
        summary={
            "models": len(rows),
            "right": len(right),
            "replayed": sum(float(str(row["replayed"])) > 0.5 for row in rows),
            "times_eager_median": round(statistics.median(times), 2) if times else None,
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
