"""Five programs that capture graphs with torch and know nothing of who watches: see `observe`.

    python benchmarks/observe_programs.py NAME [observe]

`observe` as a second argument adds the one line that is measured.  The process prints a line of
JSON when its graphs are captured, and then answers lines of standard input: `answers` with digests
of what the program computed, and `cost SECONDS` with times of steps and of replays while the
observation is closed and while it is open, by turns.
"""

import hashlib
import json
import statistics
import sys
import time

import torch
from torch import nn


def by_hand(work):
    """Captures `work` as torch's documentation has it; returns the replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = work()

    def replay():
        graph.replay()
        return answer

    return replay


def generate():
    """transformers' generate over a static cache, whose forward it compiles."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=1000,
        max_position_embeddings=256,
    )
    model = transformers.LlamaForCausalLM(config).cuda().eval()
    prompt = torch.randint(3, 1000, (2, 16), device="cuda")

    def step():
        found = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=16,
            min_new_tokens=16,
            do_sample=False,
            pad_token_id=0,
            cache_implementation="static",
            compile_config=transformers.CompileConfig(mode="reduce-overhead"),
            return_dict_in_generate=True,
            output_logits=True,
        )
        return [found.sequences, *found.logits]

    return step


def callables():
    """torch.cuda.make_graphed_callables: forward and backward."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    model, x = nn.Sequential(*layers).cuda(), torch.randn(256, 1024, device="cuda")
    graphed = torch.cuda.make_graphed_callables(model, (x,))

    def step():
        model.zero_grad()
        y = graphed(x)
        y.square().mean().backward()
        return [y, *(p.grad for p in model.parameters())]

    return step


@torch.no_grad()
def capture():
    """A capture by hand, with random numbers in it."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).cuda().eval()
    x = torch.randn(4, 128, 512, device="cuda")
    replay = by_hand(lambda: model(x + 0.1 * torch.randn_like(x)))
    return lambda: [replay()]


@torch.no_grad()
def vision():
    """A vision model, captured for two batch sizes."""
    from torchvision.models import resnet18

    torch.backends.cudnn.deterministic = True
    model = resnet18(weights=None).cuda().eval()
    batches = [torch.randn(rows, 3, 224, 224, device="cuda") for rows in (1, 8)]
    replays = [by_hand(lambda x=x: model(x)) for x in batches]
    return lambda: [replay() for replay in replays]


@torch.no_grad()
def kernel():
    """An autotuned kernel of Triton, many times in one graph."""
    import triton
    from observe_triton import gate

    n = 1 << 20
    x, y = torch.randn(n, device="cuda"), torch.randn(n, device="cuda")

    def work():
        a = x
        for _ in range(40):
            out = torch.empty_like(a)
            gate[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](a, y, out, n)
            a = out
        return a

    replay = by_hand(work)
    return lambda: [replay()]


PROGRAMS = {
    "generate": generate,
    "make_graphed_callables": callables,
    "capture by hand": capture,
    "vision model": vision,
    "Triton kernel": kernel,
}


def main():
    name, observing = sys.argv[1], sys.argv[2:] == ["observe"]
    torch.manual_seed(5)
    if observing:
        global observe, observed
        from ostinato.interop.torch import observe, observed

        observe()  # the line
    seconds = []
    end = torch.cuda.CUDAGraph.capture_end

    def counted(graph):
        begin = time.perf_counter()
        end(graph)
        seconds.append(time.perf_counter() - begin)

    torch.cuda.CUDAGraph.capture_end = counted
    step = PROGRAMS[name]()
    for _ in range(5):
        answers = step()
    torch.cuda.synchronize()
    digests = [hashlib.sha256(a.detach().cpu().numpy().tobytes()).hexdigest() for a in answers]
    print(json.dumps({"ready": name}), flush=True)
    for line in sys.stdin:
        word, *numbers = line.split()
        if word == "answers":
            graphs = observed() if observing else ()
            print(*graphs, sep="\n", file=sys.stderr)
            found = {
                "digests": digests,
                "nodes": [one.nodes for one in graphs],
                "captured": len(seconds),
                "capture_end_ms": round(1e3 * sum(seconds), 3),
            }
            print(json.dumps(found), flush=True)
            continue
        print(json.dumps({**steps(step, float(numbers[0])), **replays(step)}), flush=True)


def steps(step, seconds):
    """Times blocks of steps, closed and open by turns: the medians in microseconds, one closed
    block more than open ones."""
    size = max(3, min(30, round(0.01 / statistics.median(timed(step, 5)))))
    closed, opened = [], []
    end = time.perf_counter() + seconds
    while True:
        observe().close()
        closed.append(median(timed(step, size)[1:]))  # the first finds other methods of the class
        if time.perf_counter() > end:
            return {"closed_us": closed, "open_us": opened}
        observe()
        opened.append(median(timed(step, size)[1:]))


def replays(step):
    """The replays of a step, and the host's time of one while the observation is closed and open:
    medians, of the first few after a wait, behind which the GPU is."""
    observe()
    before = sum(one.replays for one in observed())
    step()
    every = observed()
    graph = every[0].graph
    closed, opened = [], []
    for _ in range(60):
        observe().close()
        closed += called(graph)
        observe()
        opened += called(graph)
    return {
        "replays": sum(one.replays for one in every) - before,
        "replay_us": median(closed),
        "observed_replay_us": median(opened),
    }


def called(graph):
    """The seconds of each of some calls of `replay`."""
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        graph.replay()
        times.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return times[1:]


def timed(step, count):
    """The seconds of each of so many steps, with the wait for the GPU."""
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return times


def median(seconds):
    """Their median in microseconds."""
    return round(1e6 * statistics.median(seconds), 3)


if __name__ == "__main__":
    main()
