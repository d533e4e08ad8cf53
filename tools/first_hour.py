"""Plays the first hour of a new user in an environment of its own, and asserts what is printed.

    make first-hour                     with the real model, which is fetched if it is missing
    python -m tools.first_hour --tiny   with a small random model: only packages are fetched

The base install comes first: the command's help, its report on the machine and on what is missing,
and the samples of the README and of the pages for beginners.  Then the extras: a prompt and a file
through a pipe, a conversation of five turns on a terminal, and the server with OpenAI's own client.
All of it runs on the host driver.  This tool installs the checkout; `tools.check_dist` plays the
same with the wheel.  The exit status is 0 if all checks pass.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.cli.terminal import Terminal
from tests.models.model_files import CONFIG, write_gguf

ROOT = Path(__file__).resolve().parent.parent
MODEL = "smollm2-135m"
BASE = {
    *("ostinato", "numpy", "rich", "markdown-it-py", "mdurl", "pygments", "filelock"),
    *("platformdirs", "typer", "click", "shellingham", "annotated-doc"),
    # Needed by newer versions of typer.
    *("pydantic", "pydantic-core", "annotated-types", "typing-extensions", "typing-inspection"),
}
"""The packages that the base install may bring: this one, its dependencies, and theirs."""
COMMANDS = ("generate", "chat", "serve", "inspect", "bench", "doctor", "tune", "model", "cache")
PAGES = ("README.md", "docs/index.md", "docs/tutorial.md")
KERNELS = "docs/howto/kernels.md"  # compiles CUDA C++

PLAY_PAGES = """
import sys
from pathlib import Path
from tools import samples

for page in sys.argv[2:]:
    text = (Path(sys.argv[1]) / page).read_text(encoding="utf-8")
    if page == "README.md":
        said = "".join(samples.run(page, samples.samples(text)))
        assert "scale" in said and "replays 2, eager 1" in said, said
        assert "quarantined" not in said, said
    else:
        assert samples.filled(page, text) == text, f"{page}: it prints something else"
"""
CLIENT = """
import sys
import openai

client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
(model,) = client.models.list().data
asked = [{"role": "user", "content": "What is the capital of France?"}]

def ask(**options):
    return client.chat.completions.create(
        model=model.id, messages=asked, max_tokens=24, seed=7, **options)

plain = ask()
text = plain.choices[0].message.content
assert text.strip() and 0 < plain.usage.completion_tokens <= 24, plain
# A request that names nothing is answered by options that read well.
named = ask(temperature=0.7, extra_body={"min_p": 0.05, "repetition_penalty": 1.1})
assert named.choices[0].message.content == text, (named, text)
pieces = [piece.choices[0].delta.content or "" for piece in ask(stream=True) if piece.choices]
assert len(pieces) > 1 and "".join(pieces) == text, (pieces, text)
raw = client.completions.create(model=model.id, prompt="Once upon", max_tokens=4, temperature=0)
assert raw.choices[0].text, raw
try:
    ask(temperature=-1)
except openai.BadRequestError as error:
    assert "temperature" in str(error), error
else:
    raise SystemExit("a temperature below zero was taken")
print(text)
"""
WAIT = 120.0
"""Seconds to wait for the server's first output; a guard against hangs only."""


def run(*command: str | Path, ok: int = 0, said: str = "", **environ: str) -> str:
    """Runs a command, whose exit status must be `ok`, with standard input `said`.  Returns stdout
    and stderr together."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=tempfile.gettempdir(),
        env=_environment(**environ),
        input=said,
        capture_output=True,
        text=True,
        check=False,
    )
    output = done.stdout + done.stderr
    if done.returncode != ok:
        raise SystemExit(f"{' '.join(map(str, command))} gave {done.returncode}:\n{output}")
    return output


def _environment(**environ: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return inherited | {"OSTINATO_DEVICE": "host"} | environ


def pip(environment: Path, *arguments: str) -> str:
    """Runs pip of this environment on another one, which has no pip."""
    python = environment / "bin" / "python"
    return run(sys.executable, "-m", "pip", "--python", python, *arguments)


def use(what: Path, *, demo: bool) -> None:
    """Plays the whole hour with this wheel or folder; `demo`: with the real model.

    Raises SystemExit or AssertionError if a check fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder) / "fresh"
        model = MODEL if demo else str(tiny_model(Path(folder)))
        venv.create(fresh)
        with _timed("base install"):
            pip(fresh, "install", "--quiet", str(what))
            base_install(fresh)
        with _timed(f"samples of {', '.join(PAGES)}"):
            run(fresh / "bin" / "python", "-c", PLAY_PAGES, ROOT, *PAGES, PYTHONPATH=str(ROOT))
        with _timed("extras"):
            compiler = ",cuda13" if (ROOT / KERNELS).exists() else ""
            pip(fresh, "install", "--quiet", f"{what}[llm,serve{compiler}]", "openai>=1.60")
        if compiler:
            with _timed(f"samples of {KERNELS}"):
                run(fresh / "bin" / "python", "-c", PLAY_PAGES, ROOT, KERNELS, PYTHONPATH=str(ROOT))
        with _timed("generate"):
            generate(fresh, model)
        with _timed("chat"):
            chat(fresh, model, Path(folder) / "talk.json")
        with _timed("serve"):
            serve(fresh, model)


def tiny_model(folder: Path) -> Path:
    """Writes a model with random weights, whose context has room for five turns."""
    return write_gguf(folder / "tiny.gguf", config=replace(CONFIG, context_length=4096))


@contextlib.contextmanager
def _timed(what: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    print(f"first hour: {what}: {time.monotonic() - start:.1f} s", flush=True)


def base_install(fresh: Path) -> None:
    brought = re.findall(r"^([\w.-]+)==|^([\w.-]+) @", pip(fresh, "list", "--format=freeze"), re.M)
    names = {(pinned or found).lower().replace("_", "-") for pinned, found in brought}
    assert names <= BASE, f"the base install brings {', '.join(sorted(names - BASE))} too"
    command = fresh / "bin" / "ostinato"
    for option in ("--help", "-h"):
        text = run(command, option)
        missing = [name for name in COMMANDS if not re.search(rf"^\W*{name}\b", text, re.M)]
        assert "Usage: ostinato" in text and not missing, (missing, text)
    said = run(command, "doctor")
    assert "host" in said and "ostinato" in said, said
    assert isinstance(json.loads(run(command, "doctor", "--json")), dict)
    for name in ("generate", "chat", "serve"):
        said = run(command, name, *(["Hello"] if name == "generate" else []), ok=1)
        assert "pip install 'ostinato[llm" in said and "Traceback" not in said, said
    said = run(fresh / "bin" / "python", "-c", "from ostinato.models import Decoder", ok=1)
    assert "ostinato[llm]" in said, said


def generate(fresh: Path, model: str) -> None:
    command = fresh / "bin" / "ostinato"
    options = ("-m", model, "-n", "8")
    answer = run(command, "generate", "Why is the sky blue?", *options)
    assert answer.strip(), "the demo said nothing"

    def tokens(*words: str, said: str = "") -> int:
        lines = run(command, "generate", *words, *options, "--json", said=said).splitlines()
        (summary,) = (json.loads(line) for line in lines if line.startswith("{"))
        return int(summary["prompt_tokens"])

    alone = tokens("Summarise this")
    assert tokens("Summarise", "this") == alone, "words without quotes are one prompt"
    assert tokens("Summarise this", said="The sky is blue.\n") > alone, "piped input is dropped"


def chat(fresh: Path, model: str, file: Path) -> None:
    """Plays five turns on a terminal, without sampling options."""
    turns = (
        "My name is Ada.",
        "What is a graph?",
        "Name three colours.",
        "Tell me of the sea.",
        "Good bye!",
    )
    python = str(fresh / "bin" / "python")
    options = ("-m", model, "-n", "24", "-s", "7")
    with Terminal("chat", *options, python=python, PYTHONPATH="") as terminal:
        banner = terminal.until("\r\n> ")
        assert "temperature 0.7, seed 7" in banner, banner
        for turn in turns:
            terminal.send(f"{turn}\n")
            answer = terminal.until("\r\n> ").replace(turn, "", 1).strip()
            assert answer and not answer.startswith("error:"), terminal.said
        terminal.send("/stats\n")
        assert "5 turns" in terminal.until("\r\n> "), terminal.said
        terminal.send(f"/save {file}\n")
        assert "10 messages saved" in terminal.until("\r\n> "), terminal.said
        terminal.send("/exit\n")
        assert terminal.end() == 0, terminal.said
    messages = json.loads(file.read_text(encoding="utf-8"))["messages"]
    asked = [message["content"] for message in messages if message["role"] == "user"]
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    assert asked == list(turns) and all(answer.strip() for answer in answers), messages
    for answer in answers:
        lines = Counter(line.strip() for line in answer.splitlines() if line.strip())
        assert max(lines.values()) < 3, f"an answer repeats a line: {answer}"


def serve(fresh: Path, model: str) -> None:
    with subprocess.Popen(
        [fresh / "bin" / "ostinato", "serve", "-m", model, "--port", "0", "--no-reuse"],
        cwd=tempfile.gettempdir(),
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stderr is not None
            end = time.monotonic() + WAIT
            said = ""
            while not (found := re.search(r"is served at (http://\S+)", said)):
                assert server.poll() is None and time.monotonic() < end, said
                said += server.stderr.readline()
            assert run(fresh / "bin" / "python", "-c", CLIENT, found[1]).strip()
            server.send_signal(signal.SIGINT)
            said += server.stderr.read()
            assert server.wait() == 0 and "Traceback" not in said, (server.returncode, said)
        finally:
            server.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a small random model")
    use(ROOT, demo=not parser.parse_args().tiny)
    return 0


if __name__ == "__main__":
    sys.exit(main())
