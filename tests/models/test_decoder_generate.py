"""Text generation on a tiny model: pieces, stops, summaries, interruptions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ostinato.device import Device
from ostinato.errors import ClosedError, InputError, ModelFormatError
from ostinato.models.decoder import Decoder
from ostinato.models.files.open import open_checkpoint
from ostinato.models.generate import TextGenerator
from ostinato.models.generation import AnswerText
from ostinato.models.sampling import SamplingOptions
from tests.models.model_files import SPECIAL, THINKING, write_folder
from tests.models.proof import interrupted

HOT = SamplingOptions(temperature=5.0, seed=3)


@pytest.fixture
def generator(host_device: Device, tiny: Path) -> Iterator[TextGenerator]:
    with TextGenerator(host_device, tiny) as opened:
        yield opened


def test_pieces_make_the_text_and_the_summary(generator: TextGenerator) -> None:
    answer = generator.generate("Why?", max_tokens=20, sampling=HOT)
    pieces = list(answer)
    summary = answer.summary()
    assert "".join(pieces) == answer.text == summary.text
    assert summary.text == generator.tokenizer.decode(summary.token_ids)
    assert len(pieces) > 1
    assert summary.finish_reason in ("length", "stop")
    assert summary.prompt_tokens == len(generator.encode("Why?"))
    assert summary.tokens_per_second > 0
    assert summary.prompt_tokens_per_second > 0
    assert summary.time_to_first_token > 0
    assert summary.load_seconds > 0
    assert summary.device == "host"
    launched = summary.launches_eager // summary.launches_per_token + summary.launches_replayed
    assert launched == len(summary.token_ids)
    assert sum(summary.eager_reasons.values()) == 2
    assert json.loads(json.dumps(summary.to_dict()))["token_ids"] == list(summary.token_ids)
    text = str(summary)
    assert f"; {summary.graphs_captured} graph" in text and " captured; device host" in text
    one = str(replace(summary, graphs_captured=1, token_ids=(7,), prompt_tokens=1))
    assert "; 1 graph captured; " in one and one.startswith("1 token (")
    assert "; prompt 1 token at " in one
    two = str(replace(summary, graphs_captured=2, token_ids=(7, 8), prompt_tokens=2))
    assert "; 2 graphs captured; " in two and two.startswith("2 tokens (")
    assert "eager: 2 x warming up before the capture" in text


def test_a_second_answer_starts_afresh(generator: TextGenerator) -> None:
    first = generator.generate("ab", max_tokens=6, sampling=HOT)
    text = "".join(first)
    again = generator.generate("ab", max_tokens=6, sampling=HOT)
    assert "".join(again) == text
    assert again.summary().graphs_captured <= 1
    assert again.summary().token_ids == first.summary().token_ids


@pytest.mark.parametrize("count", [1, 2, 7])
def test_max_tokens(generator: TextGenerator, count: int) -> None:
    generator.decoder.set_stop_tokens(())
    answer = generator.generate([5, 6, 7], max_tokens=count)
    list(answer)
    assert len(answer.token_ids) == count
    assert answer.summary().finish_reason == "length"


def test_the_context_ends_it(host_device: Device, tiny: Path) -> None:
    with TextGenerator(host_device, tiny, max_context=12, stop_tokens=()) as generator:
        answer = generator.generate([5] * 10, max_tokens=99)
        list(answer)
        assert answer.summary().finish_reason == "context"
        assert len(answer.token_ids) == 3
        with pytest.raises(InputError, match="13 tokens, more than the context of 12"):
            generator.generate([5] * 13)


def test_an_end_token_ends_it_and_is_no_text(generator: TextGenerator) -> None:
    generator.decoder.set_stop_tokens(())
    plain = generator.generate("abc", max_tokens=30, sampling=HOT)
    list(plain)
    tokens = plain.token_ids
    at = next(i for i in range(4, 30) if tokens[i] not in tokens[:i])
    generator.decoder.set_stop_tokens((tokens[at],))
    answer = generator.generate("abc", max_tokens=30, sampling=HOT)
    list(answer)
    assert answer.token_ids == tokens[: at + 1]
    assert answer.summary().finish_reason == "stop"


def test_stop_tokens_are_the_tokenizers_too(generator: TextGenerator) -> None:
    assert set(generator.tokenizer.eos_ids) <= set(generator.decoder.stop_tokens)


def test_chat_raw_system_and_messages(generator: TextGenerator) -> None:
    assert generator.chats
    messages = [{"role": "user", "content": "hi"}]
    assert generator.encode("hi") == generator.encode(messages) == generator.encode("hi", chat=True)
    raw = generator.encode("hi", chat=False)
    assert generator.tokenizer.decode(raw) == "hi"
    text = generator.tokenizer.decode(generator.encode("hi", system="Be."), skip_special=False)
    assert text.index("Be.") < text.index("hi")
    assert text.endswith("assistant\n")
    with pytest.raises(InputError, match="a system message needs a chat"):
        generator.encode("hi", chat=False, system="Be.")


def test_variables_of_the_template_and_special_tokens_reach_it(
    host_device: Device, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "model")
    names = {"pad_token": SPECIAL[0], "chat_template": THINKING + "{{ pad_token }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    args = {"think": False, "more": "ab"}
    with TextGenerator(host_device, folder, stop_tokens=()) as generator:
        plain, tokens = generator.encode("hi"), generator.encode("hi", template_args=args)
        text = generator.tokenizer.decode(tokens, skip_special=False)
        assert text.endswith(f"assistant\n<z></z>ab{SPECIAL[0]}")
        assert len(plain) < len(tokens)
        answer = generator.generate("hi", template_args=args, max_tokens=2)
        assert answer.prompt_tokens == len(tokens)
        conversation = generator.chat(template_args=args, max_tokens=2)
        assert conversation.say("hi").prompt_tokens == len(tokens)
        for wrong in ("hi", [5, 6]):
            with pytest.raises(InputError, match="template_args and continue_last need"):
                generator.generate(wrong, chat=False, template_args=args)


def test_an_answer_goes_on_with_the_last_message(generator: TextGenerator) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the in"}]
    tokens = generator.encode(messages, continue_last=True)
    assert generator.tokenizer.decode(tokens, skip_special=False).endswith("assistant\nthe in")
    text = "".join(generator.generate(tokens, max_tokens=8, sampling=HOT))
    answer = generator.generate(messages, continue_last=True, max_tokens=8, sampling=HOT)
    assert "".join(answer) == text
    assert answer.prompt_tokens == len(tokens)
    with pytest.raises(InputError, match="continue_last needs an assistant's message"):
        generator.generate("hi", continue_last=True)


def test_an_interruption_goes_to_the_caller_and_leaves_a_summary(generator: TextGenerator) -> None:
    generator.decoder.set_stop_tokens(())
    whole = generator.generate("abc", max_tokens=12, sampling=HOT)
    list(whole)
    answer = generator.generate("abc", max_tokens=12, sampling=HOT)
    with interrupted(5):
        list(answer)
    summary = answer.summary()
    assert summary.finish_reason == "interrupted"
    assert summary.token_ids == whole.token_ids[:4]
    assert list(answer) == [], "it is over"
    again = generator.generate("abc", max_tokens=12, sampling=HOT)
    list(again)
    assert again.token_ids == whole.token_ids


@pytest.mark.parametrize("tokens_per_launch", [1, 3, 16])
@pytest.mark.parametrize("build", ["capture", "record"])
def test_many_tokens_a_launch_give_the_same_answer(
    host_device: Device, tiny: Path, build: str, tokens_per_launch: int
) -> None:
    with TextGenerator(host_device, tiny, graphs=False) as eager:
        wanted = "".join(eager.generate("abc", max_tokens=40, sampling=HOT))
        numbers = eager.latest.summary()
        assert numbers.one_by_one == {}
    with TextGenerator(host_device, tiny, build=build) as generator:
        for _ in range(2):
            answer = generator.generate(
                "abc", max_tokens=40, sampling=HOT, tokens_per_launch=tokens_per_launch
            )
            assert "".join(answer) == wanted
        summary = answer.summary()
    assert summary.finish_reason == numbers.finish_reason
    assert summary.tokens_per_launch == tokens_per_launch
    most = -(-(len(summary.token_ids) - 1) // tokens_per_launch) + 1 + 2
    assert summary.launches_replayed <= most


def test_why_tokens_come_one_by_one_is_in_the_summary(host_device: Device, tiny: Path) -> None:
    with TextGenerator(host_device, tiny, graphs=False) as generator:
        answer = generator.generate("abc", max_tokens=5, sampling=HOT, tokens_per_launch=4)
        list(answer)
        assert answer.summary().one_by_one == {"graphs are switched off": 1}
        assert "token by token: graphs are switched off" in str(answer.summary())


def test_a_new_answer_ends_the_one_before(generator: TextGenerator) -> None:
    wanted = "".join(generator.generate("ab", max_tokens=8, sampling=HOT))
    unbegun = generator.generate("xyz", max_tokens=8, sampling=HOT)
    begun = generator.generate("xyz", max_tokens=8, sampling=HOT)
    next(begun)
    answer = generator.generate("ab", max_tokens=8, sampling=HOT)
    for old in (unbegun, begun):
        with pytest.raises(ClosedError, match="a later generation ended this one"):
            next(old)
    assert "".join(answer) == wanted


@pytest.mark.parametrize("reuse", [False, True])
def test_an_answer_leaves_other_sequences_as_they_are(
    host_device: Device, tiny: Path, reuse: bool
) -> None:
    with TextGenerator(host_device, tiny, sequences=2, stop_tokens=()) as generator:
        decoder = generator.decoder
        wanted = [decoder.prefill([5, 6, 7], 1), *(decoder.decode(1) for _ in range(3))]
        decoder.truncate(5, 1)
        list(generator.generate("ab", max_tokens=4, reuse=reuse))
        assert decoder.tokens(1) == (5, 6, 7, *wanted[:2])
        assert [decoder.decode(1) for _ in range(2)] == wanted[2:]


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0},
        {"sampling": None},
        {"sampling": {"temperature": 1.0}},
        {"stop": [""]},
        {"tokens_per_launch": 0},
        {"progress": 5},
        {"system": 5},
    ],
)
def test_a_wrong_option_leaves_the_answer_that_is_under_way(
    generator: TextGenerator, options: dict[str, Any]
) -> None:
    generator.decoder.set_stop_tokens(())
    wanted = "".join(generator.generate("ab the", max_tokens=8, sampling=HOT))
    answer = generator.generate("ab the", max_tokens=8, sampling=HOT)
    found = next(answer)
    with pytest.raises(InputError, match=next(iter(options))):
        generator.generate("xyz", **options)
    assert found + "".join(answer) == wanted


OTHERWISE: dict[str, Callable[[Decoder], object]] = {
    "prefill": lambda d: d.prefill([5, 6, 7]),
    "extend": lambda d: d.extend([5]),
    "reset": lambda d: d.reset(),
    "reset and prefill": lambda d: (d.reset(), d.prefill([5, 6, 7])),
    "truncate": lambda d: d.truncate(0),
    "keep_common": lambda d: d.keep_common([5]),
    "set_sampling": lambda d: d.set_sampling(SamplingOptions()),
    "set_stop_tokens": lambda d: d.set_stop_tokens([5]),
}


@pytest.mark.parametrize("taken", [0, 1, 2])
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("what", OTHERWISE)
def test_other_use_of_the_decoder_ends_an_answer(
    generator: TextGenerator, what: str, reuse: bool, taken: int
) -> None:
    """Before its first token, after it, and later: never with tokens or settings of another."""
    generator.decoder.set_stop_tokens(())
    list(generator.generate("ab the", max_tokens=2, sampling=HOT))
    sampling = SamplingOptions(temperature=5.0, seed=1)
    answer = generator.generate("ab the 12", max_tokens=30, sampling=sampling, reuse=reuse)
    assert bool(answer.cached_tokens) == reuse
    begun = [next(answer) for _ in range(taken)]
    assert taken != 1 or len(answer.token_ids) == 1, "the first token has text"
    OTHERWISE[what](generator.decoder)
    with pytest.raises(ClosedError, match="ended"):
        next(answer)
    assert answer.text == "".join(begun) and answer.finish_reason == "interrupted"


def test_an_answer_can_be_looked_at_while_it_comes(generator: TextGenerator) -> None:
    generator.decoder.set_stop_tokens(())
    wanted = "".join(generator.generate("ab the 12", max_tokens=9, sampling=HOT))
    answer = generator.generate("ab the 12", max_tokens=9, sampling=HOT)
    decoder, found = generator.decoder, ""
    with decoder.profile() as times:
        decoder.tokens()
        found += next(answer)
        decoder.logits(), decoder.graph(), decoder.statistics()
        found += "".join(answer)
    assert found == wanted and times


def test_a_summary_before_the_first_token(generator: TextGenerator) -> None:
    summary = generator.generate("abc").summary()
    assert summary.finish_reason == "interrupted"
    assert (summary.token_ids, summary.text, summary.tokens_per_second) == ((), "", 0.0)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {"chat": False}, "the prompt is empty"),
        ([], {}, "the prompt is empty"),
        ([5, {"role": "user", "content": "x"}], {}, "mixes messages and token ids"),
        ([999], {}, "token 999 is outside"),
    ],
)
def test_wrong_prompts(
    generator: TextGenerator, prompt: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        list(generator.generate(prompt, **options))


def test_a_folder_and_an_open_checkpoint(host_device: Device, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    with TextGenerator(host_device, folder) as generator:
        text = "".join(generator.generate("ab", max_tokens=5))
    with (
        open_checkpoint(folder) as checkpoint,
        TextGenerator(host_device, checkpoint, graphs=False) as generator,
    ):
        assert checkpoint.tensor("final_norm").shape == (64,), "the caller's, so still open"
        answer = generator.generate("ab", max_tokens=5)
        assert "".join(answer) == text
        assert answer.summary().launches_replayed == 0
        assert answer.summary().eager_reasons == {"graphs are switched off": 5}


def test_a_known_name_is_looked_up(
    host_device: Device, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ostinato.models.files import store

    monkeypatch.setattr(store, "resolve", {"tiny": tiny}.__getitem__)
    with TextGenerator(host_device, "tiny") as generator:
        assert len(list(generator.generate("ab", max_tokens=3))) <= 4


def test_the_packages_names_are_all_there() -> None:
    import ostinato.models

    for name in ostinato.models.__all__:
        assert name in dir(ostinato.models)
        assert getattr(ostinato.models, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ostinato.models.nothing


def test_a_damaged_tokenizer_gives_the_memory_back(host_device: Device, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{")
    free, _ = host_device.memory_info()
    with pytest.raises(ModelFormatError, match="tokenizer is damaged"):
        TextGenerator(host_device, folder)
    host_device.synchronize()
    assert host_device.memory_info()[0] == free


def test_the_text_of_tokens_as_they_come(generator: TextGenerator) -> None:
    """A caller that takes the tokens of many answers itself needs this."""
    tokens = generator.tokenizer.encode("a the b in 12 – ü")
    for stop, wanted, ended in (
        ((), "a the b in 12 – ü", False),
        ("b i", "a the ", True),
        (["üb", "zz"], "a the b in 12 – ü", False),
    ):
        text, pieces = AnswerText(generator.tokenizer, stop), []
        for index, token in enumerate(tokens):
            piece, stopped = text.push(token, last=index == len(tokens) - 1)
            pieces.append(piece)
            if stopped:
                break
        assert ("".join(pieces), stopped) == (wanted, ended)
        assert len(pieces) > 3
    with pytest.raises(InputError, match="stop"):
        AnswerText(generator.tokenizer, [""])


def test_a_closed_generator(host_device: Device, tiny: Path) -> None:
    generator = TextGenerator(host_device, tiny)
    generator.close()
    with pytest.raises(ClosedError):
        list(generator.generate("abc"))
