"""Writes tests/data/reference_smollm2.json: answers of transformers for the tests' GGUF file.

The tool does not import ostinato, on purpose: it reads the file with transformers' own GGUF loader,
and runs the model in float32 on the CPU.  It needs an environment of its own:

    python3 -m venv /tmp/refvenv
    /tmp/refvenv/bin/pip install torch transformers gguf numpy accelerate
    /tmp/refvenv/bin/python tools/make_reference.py FILE.gguf tests/data/reference_smollm2.json

Transformers 5.23 builds the tokenizer of a gpt2-type GGUF without reading `tokenizer.ggml.pre`, so
it splits digits differently than in the model's training ("a   5" gives other ids).  It is replaced
by the pre-tokenizer of HuggingFaceTB/SmolLM2's own tokenizer.json.

The JSON has one record for each prompt: the rendered text, its token ids, the 64 greedy tokens
after it (past any end-of-sequence token), and one digest for each step.  The digest of step i
describes the logits that chose token i: the five largest (ids and values), the values at
`sample_indices`, and their mean and Euclidean norm in float64.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS = 64
TOP = 5
SAMPLED = 16

RAW = {
    "question": "Why is the sky blue?",
    "code": (
        'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n    if n <   2:\n        '
    ),
    "numbers": "In 2023, 17 of 1024 samples failed; in 2024,  only 3 of 65536 did. The rate fell",
}
CHAT = {
    "chat_question": [{"role": "user", "content": "Why is the sky blue?"}],
    "chat_unicode": [
        {"role": "system", "content": "You are a careful translator."},
        {"role": "user", "content": "Translate: „Größe ist relativ“ – 東京タワー, naïve café 🎉"},
    ],
}


def digest(logits: torch.Tensor, indices: list[int]) -> dict[str, object]:
    """Returns the digest of one step's logits, [vocabulary] in float32."""
    top = torch.topk(logits, TOP)
    exact = logits.double()
    return {
        "top_ids": top.indices.tolist(),
        "top_values": [round(value, 6) for value in top.values.tolist()],
        "sampled": [round(value, 6) for value in logits[indices].tolist()],
        "mean": round(exact.mean().item(), 9),
        "norm": round(exact.norm().item(), 6),
    }


@torch.inference_mode()
def greedy(model: torch.nn.Module, prompt: list[int], indices: list[int]) -> dict[str, object]:
    """Returns STEPS greedy tokens after `prompt`, and each step's digest."""
    ids = torch.tensor([prompt])
    cache = None
    tokens, steps, margin = [], [], float("inf")
    for _ in range(STEPS):
        answer = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache = answer.past_key_values
        logits = answer.logits[0, -1]
        steps.append(digest(logits, indices))
        first, second = torch.topk(logits, 2).values.tolist()
        margin = min(margin, first - second)
        tokens.append(int(logits.argmax()))
        ids = torch.tensor([[tokens[-1]]])
    return {"tokens": tokens, "smallest_margin": round(margin, 6), "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    where: Path = arguments.gguf
    torch.manual_seed(0)
    source = {"gguf_file": where.name}
    model = AutoModelForCausalLM.from_pretrained(
        where.parent, dtype=torch.float32, attn_implementation="eager", **source
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(where.parent, **source)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    vocabulary = model.config.vocab_size
    indices = [(i * 3067 + 11) % vocabulary for i in range(SAMPLED)]

    prompts = [{"name": name, "kind": "raw", "text": text} for name, text in RAW.items()]
    for name, messages in CHAT.items():
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompts.append({"name": name, "kind": "chat", "messages": messages, "text": text})
    for prompt in prompts:
        ids = tokenizer(prompt["text"], add_special_tokens=False).input_ids
        prompt["prompt_ids"] = ids
        prompt.update(greedy(model, ids, indices))
        prompt["answer"] = tokenizer.decode(prompt["tokens"])
        print(
            f"{prompt['name']}: smallest margin {prompt['smallest_margin']}\n{prompt['answer']}\n",
            file=sys.stderr,
        )

    reference = {
        "made_by": "tools/make_reference.py",
        "gguf": where.name,
        "gguf_sha256": hashlib.sha256(where.read_bytes()).hexdigest(),
        "dtype": "float32",
        "versions": {
            name: version(name) for name in ("torch", "transformers", "tokenizers", "gguf", "numpy")
        },
        "steps": STEPS,
        "sample_indices": indices,
        "prompts": prompts,
    }
    text = json.dumps(reference, ensure_ascii=False, separators=(",", ":"))
    arguments.out.write_text(text.replace('{"top_ids"', '\n{"top_ids"') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
