"""Runs a model of transformers eagerly and accelerated: the same call, on the same weights.

    python examples/generate_transformers.py                          # a small random model
    python examples/generate_transformers.py --model path/to/a/model --prompt "Why is the sky blue?"

It needs PyTorch and transformers.  On a GPU the model is in bfloat16; on the CPU it is in float32,
and NumPy decodes, which is slow.
"""

import argparse
import importlib.util
import time
from typing import Any


def small_model(device: str) -> Any:
    import torch  # type: ignore
    import transformers  # type: ignore

    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=1000,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    return model.to(device, torch.bfloat16 if device == "cuda" else torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", help="a folder with a Llama, Mistral or Qwen; a small random Llama without"
    )
    parser.add_argument("--prompt", default="Why is the sky blue?", help="with --model")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()
    if not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        print("This example needs PyTorch and transformers: pip install torch transformers")
        return
    import torch
    import transformers

    from ostinato.interop.transformers import accelerate

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = None
    if options.model:
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
        kind = torch.bfloat16 if device == "cuda" else torch.float32
        model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=kind)
        model = model.to(device).eval()
        inputs = tokenizer(options.prompt, return_tensors="pt").to(device)
    else:
        model = small_model(device)
        inputs = {"input_ids": torch.tensor([[1, 5, 99, 130]], device=device)}

    def generate(name: str) -> Any:
        arguments = {**inputs, "max_new_tokens": options.max_new_tokens, "do_sample": False}
        model.generate(**arguments)  # the first call compiles, captures, allocates
        began = time.perf_counter()
        answer = model.generate(**arguments)
        seconds = time.perf_counter() - began
        new = answer.shape[1] - arguments["input_ids"].shape[1]
        print(f"{name}: {new} tokens in {seconds * 1e3:.1f} ms")
        return answer[0]

    generate("transformers")
    with accelerate(model) as accelerated:
        answer = generate("accelerated")
        model.generate(**inputs, max_new_tokens=4, num_beams=2)  # beams: not accelerated
        print(accelerated.statistics())
    print(answer.tolist() if tokenizer is None else tokenizer.decode(answer))


if __name__ == "__main__":
    main()
