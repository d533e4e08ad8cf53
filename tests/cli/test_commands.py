"""The commands as a user meets them: what they print and write."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from unittest import mock

import pytest

from ostinato.driver import launcher
from ostinato.models.config import tensor_shapes
from tests.cli.commands import here, refused
from tests.models.model_files import CONFIG, TEMPLATE, write_folder, write_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights, with a tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_gguf(path, config=replace(CONFIG, context_length=512))


def test_version_and_help() -> None:
    assert here("--version").out.startswith("ostinato ")
    for command in (
        "generate",
        "chat",
        "serve",
        "inspect",
        "bench",
        "doctor",
        "autopsy",
        "tune",
        "model",
        "cache",
        "graph",
    ):
        answer = here(command, "--help")
        assert answer.status == 0 and answer.out.startswith(f"Usage: ostinato {command}")
        assert answer.out.isascii()  # shown as it is in any locale


def test_every_summary_is_whole_in_eighty_columns() -> None:
    for group in ((), ("model",), ("cache",), ("graph",)):
        answer = here(*group, "-h", COLUMNS="80")
        assert answer.status == 0
        listed = answer.out.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
        assert len(listed) >= 3
        for line in listed:
            assert line.endswith(".") and not line.endswith("..."), line
    for command in (("generate",), ("model", "show"), ("serve",)):
        assert here(*command, "-h").out == here(*command, "--help").out != ""


def test_help_and_version_load_neither_numpy_nor_a_driver() -> None:
    code = (
        "import sys\n"
        "from ostinato.cli.main import run\n"
        "for arguments in (['--help'], ['--version'], ['generate', '--help'], ['chat', '--help'],\n"
        "                  ['doctor', '--help'], ['cache', 'list', '--help'], ['nonsense'],\n"
        "                  ['generate', '--nonsense'], ['serve', '--help']):\n"
        "    run(arguments)\n"
        "    loaded = {'numpy', 'cuda', 'ostinato.device', 'ostinato.driver.api'}\n"
        "    loaded &= set(sys.modules)\n"
        "    assert not loaded, (arguments, loaded)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_doctor_says_what_there_is(tmp_path: Path) -> None:
    found = json.loads(here("doctor", "--json", OSTINATO_CACHE_DIR=str(tmp_path)).out)
    assert found["host"]["kernels in"] == "host" and found["host"]["lacks"] == "nothing"
    assert found["ostinato"]["CUDA compiler"].startswith(("NVRTC 1", "not available: "))
    assert found["ostinato"]["replay call"] == launcher.description()
    assert found["caches"] == {"folder": str(tmp_path), "models": "none yet", "kernels": "none yet"}
    assert isinstance(found["cuda"], dict) or "not available" in found["cuda"]
    assert "OSTINATO_DEVICE" in found["settings"]
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "one").write_bytes(bytes(200_000))
    assert "1 file, 0.2 MB" in here("doctor", OSTINATO_CACHE_DIR=str(tmp_path)).out


@pytest.mark.parametrize(
    ("torch", "said"),
    [
        ("2.8.0", "2.8.0: too old, 2.9 or later is needed"),
        ("2.8.0+cu128", "2.8.0+cu128: too old, 2.9 or later is needed"),
        ("1.13.1", "1.13.1: too old, 2.9 or later is needed"),
        ("2.9", "2.9"),
        ("2.9.0a0+git1", "2.9.0a0+git1"),
        ("2.11.0+cu130", "2.11.0+cu130"),
        ("nightly", "nightly: too old, 2.9 or later is needed"),
    ],
)
def test_doctor_says_which_packages_are_too_old(torch: str, said: str) -> None:
    version = metadata.version

    def found(package: str) -> str:
        return torch if package == "torch" else version(package)

    with mock.patch.object(metadata, "version", found):
        packages = json.loads(here("doctor", "--json").out)["packages"]
    assert packages["torch"] == said
    assert packages["numpy"] == version("numpy")


@pytest.mark.parametrize(
    ("gpus", "library", "way", "words"),
    [
        (0, "2.28.9", "auto", "CPU ranks use the group's channel; GPU ranks need two GPUs or more"),
        (0, "2.28.9", "exchange", "CPU ranks use their memory, if they are threads"),
        (2, "not available: pip", "auto", "nothing, so that GPUs cannot be ranks: NCCL is not av"),
        (2, "2.28.9", "library", "NCCL for all messages"),
        (2, "2.28.9", "auto", "the ranks' memory for small messages, NCCL for the others; NCCL"),
        (2, "2.28.9", "exchange", "the others; an error where GPUs do not reach each other"),
        (2, "2.28.9", "fast", "not valid: OSTINATO_COLLECTIVES='fast'"),
    ],
)
def test_doctor_says_what_ranks_would_exchange_by(
    gpus: int, library: str, way: str, words: str
) -> None:
    with (
        mock.patch("ostinato.driver.cuda.driver.gpu_count", return_value=gpus),
        mock.patch("ostinato.distributed.nccl.description", return_value=library),
    ):
        found = json.loads(here("doctor", "--json", OSTINATO_COLLECTIVES=way).out)
    assert words in found["ranks"]["used"]


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "none"),
        ({"RANK": "0"}, "not valid: WORLD_SIZE is not set"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "mpirun: rank 1 of 2"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "9"},
            "torchrun: rank 1 of 2, rank 0 at a:9",
        ),
        ({"OSTINATO_GROUP": "0/2/secret:1:token"}, "OSTINATO_GROUP, see the settings"),
    ],
)
def test_doctor_says_which_launcher_there_is(environ: dict[str, str], words: str) -> None:
    found = json.loads(here("doctor", "--json", **environ).out)
    assert found["ranks"]["launcher"].startswith(words)


def test_doctor_says_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    wrong = {"OSTINATO_CACHE_DIR": str(file), "OSTINATO_PROFILE_EVERY": "soon"}
    answer = here("doctor", "--json", **wrong)
    assert answer.status == 0
    found = json.loads(answer.out)
    assert "Not a directory" in found["caches"]["models"]
    assert found["settings"]["OSTINATO_PROFILE_EVERY"].startswith("not valid: ")
    answer = here("doctor", OSTINATO_CACHE_DIR="~nosuchuser/x")
    assert answer.status == 0 and "no home folder of that name" in answer.out


def test_model_list(tmp_path: Path) -> None:
    (row,) = json.loads(here("model", "list", "--json", OSTINATO_CACHE_DIR=str(tmp_path)).out)
    assert row["name"] == "smollm2-135m"
    assert row["present"] is False
    listed = here("model", "list", OSTINATO_CACHE_DIR=str(tmp_path)).out
    assert "not fetched: 93 MB, by ostinato model pull" in listed
    answer = here("model", "remove", "smollm2-135m", OSTINATO_CACHE_DIR=str(tmp_path))
    assert answer.status == 0 and "was not there" in answer.out


def test_model_show_says_what_a_model_is(tmp_path: Path) -> None:
    advice = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    metadata = {"general.name": "A Tiny One", "general.license": "apache-2.0", **advice}
    file = write_gguf(tmp_path / "tiny.gguf", kind="Q8_0", metadata=metadata)
    found = json.loads(here("model", "show", str(file), "--json").out)
    assert (found["name"], found["family"]) == ("A Tiny One", "llama")
    assert (found["licence"], found["context"]) == ("apache-2.0", CONFIG.context_length)
    count = sum(math.prod(shape) for shape in tensor_shapes(CONFIG).values())
    assert found["parameters"] == count
    assert found["sizes"]["KV heads"] == 2 and found["sizes"]["vocabulary"] == 280
    assert found["weights"]["Q8_0"]["tensors"] == 15 and found["weights"]["F32"]["tensors"] == 5
    assert found["tokenizer"] == {
        "begin": "<|im_start|>",
        "end": ["<|im_end|>", "<|endoftext|>"],
    }
    assert found["chat template"] == f"{len(TEMPLATE)} characters"
    assert (found["sampling"]["temperature"], found["sampling"]["top_k"]) == (0.5, 20)
    assert found["sampling from"] == found["path"] == str(file)
    text = here("model", "show", str(file)).out
    assert f"parameters     {count:,}\n" in text
    assert "sampling       temperature 0.5; top_k 20; top_p 1; min_p 0; repetition" in text

    folder = write_folder(tmp_path / "folder", model_type="llama")
    (folder / "README.md").write_text("---\nlicense: mit\n---\nlicense: other\n")
    found = json.loads(here("model", "show", str(folder), "--json").out)
    assert (found["name"], found["family"], found["licence"]) == ("folder", "llama", "mit")
    assert found["sampling"]["temperature"] == 0.7 and "advise none" in found["sampling from"]
    (folder / "README.md").unlink()
    assert "licence        not named in its files\n" in here("model", "show", str(folder)).out


def test_model_show_fetches_nothing(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    answer = here("model", "show", "smollm2-135m", OSTINATO_CACHE_DIR=str(cache))
    assert answer.status == 1 and "ostinato model pull smollm2-135m" in answer.err
    assert not cache.exists()
    refused(here("model", "show", "no such model"), "no file or folder")


def generated(*arguments: str) -> dict:
    answer = here("generate", "--json", *arguments)
    assert answer.status == 0, answer.err
    assert answer.err == "" and answer.out.count("\n") == 1
    return json.loads(answer.out)


def test_generate_replays_graphs_and_eager_says_the_same(smollm2_path: Path) -> None:
    options = ("What is 2 + 2?", "--model", str(smollm2_path), "--max-tokens", "10")
    graphs, eager = generated(*options), generated(*options, "--no-graphs")
    assert graphs["token_ids"] == eager["token_ids"]
    assert graphs["graphs_captured"] >= 1
    assert graphs["launches_replayed"] >= 7
    assert eager["launches_replayed"] == eager["graphs_captured"] == 0
    assert eager["eager_reasons"]
    assert eager["launches_eager"] > 10 * graphs["launches_replayed"]
    assert {"text", "tokens_per_second", "device"} <= graphs.keys()


def test_every_way_to_generate_says_the_same(tiny: Path) -> None:
    options = ("ab", "-m", str(tiny), "-n", "20", "-t", "1", "-s", "3")
    plain = generated(*options)
    for way in (["--no-graphs"], ["--build", "record"], ["--tokens-per-launch", "4"]):
        assert generated(*options, *way)["token_ids"] == plain["token_ids"]
    assert generated(*options[:-1], "4")["token_ids"] != plain["token_ids"]
    assert generated(*options, "--raw")["prompt_tokens"] < plain["prompt_tokens"]


def test_inspect_shows_the_decode_step(smollm2_path: Path, tmp_path: Path) -> None:
    picture = tmp_path / "new" / "decode.svg"
    # The picture besides: what other programs read stays as it is.
    answer = here("inspect", "--json", "--svg", str(picture), "--model", str(smollm2_path))
    graph = json.loads(answer.out)
    names = [node["name"] for node in graph["nodes"]]
    assert names.count("attention") == 30
    assert names[-1] == "sample"
    assert picture.read_text().startswith("<svg")
    assert [path.name for path in picture.parent.iterdir()] == ["decode.svg"]


def test_inspect_in_other_forms(tiny: Path, tmp_path: Path) -> None:
    assert "attention" in here("inspect", "prefill", "--model", str(tiny)).out
    assert here("inspect", "--dot", "--model", str(tiny)).out.startswith("digraph")
    picture = tmp_path / "decode.svg"
    link = tmp_path / "link.svg"
    link.symlink_to(picture)
    answer = here("inspect", "--svg", str(link), "--model", str(tiny))
    assert "nodes drawn to" in answer.out
    assert link.is_symlink() and picture.read_text().startswith("<svg")


def test_a_picture_that_cannot_be_written_is_refused(tiny: Path, tmp_path: Path) -> None:
    for path in (tmp_path, Path(__file__) / "decode.svg", tmp_path / ("x" * 300) / "y"):
        refused(here("inspect", "--svg", str(path), "--model", str(tiny)), "--svg")


@pytest.mark.parametrize(
    "options",
    [
        ("--max-tokens", "0"),
        ("--temperature", "-1"),
        ("--temperature", "nan"),
        ("--temperature", "inf"),
        ("--top-p", "2"),
        ("--top-p", "nan"),
        ("--seed", str(1 << 64)),
        ("--max-context", str(1 << 64)),
        ("--max-context", "3"),
        ("--max-context", "513"),
        ("--max-context", "x"),
        ("--min-p", "1.5"),
        ("--min-p", "nan"),
        ("--repetition-penalty", "0"),
        ("--stop", ""),
        ("--stop", "caf\udce9"),
        ("--threads", "0"),
        ("--file", "/nowhere"),
        ("--file", "a\0b"),
        ("--file", "/"),
        ("--tokens-per-launch", "257"),
        ("--device", "tpu"),
        ("--build", "by hand"),
        ("--nonsense",),
        ("--system", "caf\udce9"),
    ],
)
def test_bad_options_do_nothing(options: tuple[str, ...], tiny: Path) -> None:
    prompt = () if options[0] == "--file" else ("hello",)
    word = "no device" if options[0] == "--device" else options[0]
    refused(here("generate", *prompt, *options, "--model", str(tiny)), word)


@pytest.mark.parametrize(
    "options",
    [("--max-tokens", "0"), ("--top-p", "2"), ("--max-context", "513"), ("--stop", ""),
     ("--seed", str(1 << 64)), ("--repetition-penalty", "nan"), ("--nonsense",)],
)  # fmt: skip
def test_bad_options_of_a_chat_do_nothing(options: tuple[str, ...], tiny: Path) -> None:
    refused(here("chat", *options, "--model", str(tiny)), options[0])


def test_a_prompt_that_is_no_text_is_refused(tiny: Path) -> None:
    refused(here("generate", "caf\udce9", "--model", str(tiny)), "no text")
    refused(here("generate", "", "--raw", "--model", str(tiny)), "empty")


def test_a_device_that_is_none_is_refused_before_a_model_is_fetched(tmp_path: Path) -> None:
    for command in (("generate", "hello"), ("inspect",), ("bench", "--model", "smollm2-135m")):
        answer = here(*command, "--device", "tpu", OSTINATO_CACHE_DIR=str(tmp_path / "cache"))
        refused(answer, "tpu")
    answer = here("inspect", OSTINATO_DEVICE="tpu", OSTINATO_CACHE_DIR=str(tmp_path / "cache"))
    refused(answer, "OSTINATO_DEVICE")
    assert list(tmp_path.iterdir()) == []
