"""Times one process from its start to the first token, for `benchmarks.startup`; prints JSON.

The clock is read before anything is imported, and each import belongs to the phase that needs it.
"""

import time

BEGAN = time.monotonic_ns()  # the same clock in every process


def main(spawned: int, device_name: str, model: str, shape: str, context: int) -> dict[str, object]:
    marks = {"interpreter": BEGAN - spawned}
    last = BEGAN

    def done(phase: str, known: float = 0.0) -> None:
        """Notes the time since the last phase, less `known` seconds that belong to other phases."""
        nonlocal last
        now = time.monotonic_ns()
        marks[phase] = now - last - int(known * 1e9)
        last = now

    import ostinato as ost
    from ostinato.models import Decoder, TextGenerator, open_checkpoint

    done("imports")
    device = ost.open_device(device_name)
    done("device")
    if shape:
        from ostinato.bench.random_weights import random_checkpoint
        from ostinato.bench.shapes import SHAPES

        checkpoint = random_checkpoint(SHAPES[shape])
        context = min(context, checkpoint.config.context_length)
        done("open the file")
        decoder = Decoder(device, checkpoint, max_context=context, stop_tokens=())
        generator = None
    else:
        checkpoint = open_checkpoint(model)
        done("open the file")
        generator = TextGenerator(device, checkpoint, max_context=context)
        decoder = generator.decoder
    loaded = decoder.statistics()
    inside = {
        "weights": loaded.load_seconds,
        "plan": loaded.plan_seconds,
        "kernels": loaded.kernel_seconds,
    }
    marks.update({phase: int(seconds * 1e9) for phase, seconds in inside.items()})
    done("tokenizer (beside the weights) and the rest", sum(inside.values()))
    if generator is None:
        token = decoder.prefill(list(range(1, 40)))
        text = ""
    else:
        answer = generator.generate("Why is the sky blue?", max_tokens=8)
        done("encode the prompt")
        text = next(answer)
        token = answer.token_ids[0]
    numbers = decoder.statistics()
    more = numbers.kernel_seconds - loaded.kernel_seconds
    marks["kernels"] += int(more * 1e9)
    done("prompt and first token", more)
    return {
        "total_ns": last - spawned,
        "phases_ns": marks,
        "token": token,
        "text": text,
        "prompt_tokens": numbers.prefill_tokens,
        "device": device.properties.name,
    }


if __name__ == "__main__":
    import json
    import sys

    given = sys.argv[1:]
    print(json.dumps(main(int(given[0]), given[1], given[2], given[3], int(given[4]))), flush=True)
