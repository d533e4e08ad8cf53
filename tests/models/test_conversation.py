"""Conversations: what is read anew, what stays, and what a file may say."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ostinato.device import Device
from ostinato.errors import ClosedError, InputError, ModelFormatError
from ostinato.models.conversation import Conversation
from ostinato.models.generate import TextGenerator
from ostinato.models.sampling import SamplingOptions
from tests.models.model_files import CONFIG, write_gguf
from tests.models.proof import interrupted

HOT = SamplingOptions(temperature=1.5, seed=3, repetition_penalty=1.2)
CHAT: dict[str, Any] = {"max_tokens": 8, "sampling": HOT}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    return write_gguf(path, config=replace(CONFIG, context_length=512))


@pytest.fixture
def generator(host_device: Device, tiny: Path) -> Iterator[TextGenerator]:
    """Steps of one row, so that a prompt's bits are those of an answer's tokens: sums of BLAS go
    in another order for more rows."""
    with TextGenerator(host_device, tiny, max_rows=1, stop_tokens=(2,)) as opened:
        yield opened


def said(conversation: Conversation, text: str) -> str:
    return "".join(conversation.say(text))


def in_cache(generator: TextGenerator) -> tuple[tuple[int, ...], bytes, bytes]:
    """All that the next token depends on: tokens, their keys and values, and the logits."""
    decoder = generator.decoder
    tokens = decoder.tokens()
    cache = decoder.plan.buffers["cache"].to_numpy(decoder.stream)
    # [layers, 2, sequences, kv_heads, context, head_size]; the last token's are not there yet.
    used = np.ascontiguousarray(cache[..., : len(tokens) - 1, :])
    return tokens, used.tobytes(), decoder.plan.buffers["logits"].to_numpy(decoder.stream).tobytes()


def afresh(
    device: Device, tiny: Path, messages: list[dict[str, str]], text: str
) -> tuple[str, tuple[tuple[int, ...], bytes, bytes]]:
    """The answer of another generator, which reads all messages at once, and its cache."""
    with TextGenerator(device, tiny, max_rows=1, stop_tokens=(2,)) as other:
        answer = other.generate([*messages, {"role": "user", "content": text}], **CHAT)
        return "".join(answer), in_cache(other)


def test_a_second_turn_reads_only_what_is_new(
    generator: TextGenerator, host_device: Device, tiny: Path
) -> None:
    conversation = generator.chat(system="Be.", **CHAT)
    first = said(conversation, "the end")
    before = generator.decoder.tokens()
    messages = conversation.messages
    assert messages == [
        {"role": "system", "content": "Be."},
        {"role": "user", "content": "the end"},
        {"role": "assistant", "content": first},
    ]
    answer = conversation.say("and then")
    text = "".join(answer)
    summary = answer.summary()
    whole = generator.encode([*messages, {"role": "user", "content": "and then"}])
    common = next(
        i for i, (a, b) in enumerate(zip([*before[:-1], -1], whole, strict=False)) if a != b
    )
    assert summary.cached_tokens == common > len(generator.encode(messages[:2])) - 5
    assert summary.prompt_tokens == len(whole)
    read = conversation.statistics()
    assert read.prompt_tokens_cached == common
    assert read.prompt_tokens_read == len(generator.encode(messages[:2])) + len(whole) - common
    assert read.turns == 2 and read.tokens == len(whole) + len(answer.token_ids)
    assert (text, in_cache(generator)) == afresh(host_device, tiny, messages, "and then")
    assert f"({common} in the cache)" in str(summary)


@pytest.mark.parametrize(("pieces", "per_launch"), [(1, 1), (3, 1), (1, 4), (5, 4)])
def test_a_stopped_answer_stays_as_far_as_it_was_shown(
    generator: TextGenerator, host_device: Device, tiny: Path, pieces: int, per_launch: int
) -> None:
    """The device is further when it is stopped; nothing of that may show."""
    conversation = generator.chat(**CHAT, tokens_per_launch=per_launch)
    said(conversation, "ab")  # captures, so that the next answer is computed ahead
    answer = conversation.say("the end")
    shown = "".join(next(answer) for _ in range(pieces))
    assert conversation.messages[-1] == {"role": "assistant", "content": shown}
    messages = conversation.messages
    text = said(conversation, "and then")
    assert (text, in_cache(generator)) == afresh(host_device, tiny, messages, "and then")
    with pytest.raises(ClosedError, match="a later generation"):
        next(answer)


@pytest.mark.parametrize("calls", [1, 2, 4])
def test_an_interruption_leaves_what_was_shown(
    generator: TextGenerator, host_device: Device, tiny: Path, calls: int
) -> None:
    conversation = generator.chat(**CHAT)
    said(conversation, "ab")
    before = conversation.messages
    answer, shown = conversation.say("the end"), []
    with interrupted(calls):
        for piece in answer:
            shown.append(piece)
    messages = conversation.messages
    if shown:
        assert messages[-1]["content"] == "".join(shown)
    else:
        assert messages == before, "nothing was answered: the turn is not there"
    text = said(conversation, "and then")
    assert (text, in_cache(generator)) == afresh(host_device, tiny, messages, "and then")


def test_an_interruption_while_the_prompt_is_read(
    generator: TextGenerator, host_device: Device, tiny: Path
) -> None:
    conversation = generator.chat(**CHAT)
    said(conversation, "ab")
    before, seen = conversation.messages, []

    def interrupt(done: int, total: int) -> None:
        seen.append((done, total))
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(conversation.say("a long message, that is read row by row", progress=interrupt))
    assert seen[0] == (1, seen[0][1]) and len(seen) == 5
    assert conversation.messages == before
    text = said(conversation, "and then")
    assert (text, in_cache(generator)) == afresh(host_device, tiny, before, "and then")


def test_a_stop_string_ends_an_answer_and_is_no_part_of_it(generator: TextGenerator) -> None:
    whole = "".join(generator.generate("the end", max_tokens=30, sampling=HOT))
    stop = whole[4:7]
    at = whole.index(stop)
    conversation = generator.chat(max_tokens=30, sampling=HOT, stop=["nothing", stop])
    answer = conversation.say("the end")
    pieces = list(answer)
    assert "".join(pieces) == answer.text == whole[:at]
    assert answer.summary().finish_reason == "stop"
    assert conversation.messages[-1]["content"] == whole[:at]
    assert said(conversation, "and then") is not None, "the next turn goes on from there"


def test_an_answer_has_no_space_that_is_the_tokenizers_own(
    host_device: Device, tmp_path: Path
) -> None:
    """SentencePiece writes a space before all text: a turn has none, as with `generate`."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [f"\u2581q{index}" for index in range(CONFIG.vocabulary - len(tokens))]
    named = {
        "model": "llama",
        "pre": None,
        "merges": None,
        "tokens": [*tokens, *words],
        "scores": [-float(index) for index in range(CONFIG.vocabulary)],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
    }
    metadata = {f"tokenizer.ggml.{name}": value for name, value in named.items()}
    path = write_gguf(tmp_path / "pieces.gguf", metadata=metadata)
    begun = 0
    with TextGenerator(host_device, path) as generator:
        for seed in range(200):
            if begun and seed > 9:
                break
            sampling = SamplingOptions(temperature=5.0, seed=seed)
            asked = [{"role": "user", "content": "a"}]
            wanted = generator.generate(asked, max_tokens=3, sampling=sampling)
            text = "".join(wanted)
            assert said(generator.chat(max_tokens=3, sampling=sampling), "a") == text
            begun += wanted.token_ids[0] >= len(tokens)
    assert begun, "no answer begins with a word"


def test_pieces_of_many_rows_say_the_same(host_device: Device, tiny: Path) -> None:
    """The tokens are the same; bits are not, since sums have another order."""
    with TextGenerator(host_device, tiny) as generator:
        conversation = generator.chat(max_tokens=12)
        said(conversation, "the end of a longer message")
        messages = conversation.messages
        text = said(conversation, "and then")
        logits = generator.decoder.plan.buffers["logits"].to_numpy(generator.decoder.stream)
        new = [*messages, {"role": "user", "content": "and then"}]
        assert "".join(generator.generate(new, max_tokens=12)) == text
        again = generator.decoder.plan.buffers["logits"].to_numpy(generator.decoder.stream)
        np.testing.assert_allclose(logits, again, rtol=1e-3, atol=1e-4)


def test_other_generations_and_conversations_in_between(
    generator: TextGenerator, host_device: Device, tiny: Path
) -> None:
    one, two = generator.chat(**CHAT), generator.chat(system="Be.", **CHAT)
    said(one, "ab")
    said(two, "xyz")
    list(generator.generate("something else", max_tokens=3))
    for conversation in (one, two):
        messages = conversation.messages
        text = said(conversation, "and then")
        assert (text, in_cache(generator)) == afresh(host_device, tiny, messages, "and then")


def test_a_full_context_is_said_and_loses_nothing(host_device: Device, tiny: Path) -> None:
    with TextGenerator(host_device, tiny, max_context=90, stop_tokens=()) as generator:
        conversation = generator.chat(max_tokens=1000)
        answer = conversation.say("ab")
        text = "".join(answer)
        assert answer.finish_reason == "context"
        messages = conversation.messages
        assert messages[-1]["content"] == text
        with pytest.raises(InputError, match=r"the context is full.*max_context is 90.*2 messages"):
            conversation.say("and then")
        assert conversation.messages == messages
        assert conversation.statistics().tokens == 91, "the last token needs no position"
        conversation.reset()
        assert said(conversation, "ab") == text


def test_a_wrong_message_or_option_changes_nothing(generator: TextGenerator) -> None:
    conversation = generator.chat(**CHAT)
    said(conversation, "ab")
    before = conversation.messages
    for wrong in (None, 5, b"x", "caf\udce9"):
        with pytest.raises(InputError):
            conversation.say(wrong)  # type: ignore[arg-type]
    conversation.max_tokens = 0
    with pytest.raises(InputError, match="max_tokens is 0"):
        conversation.say("x")
    assert conversation.messages == before
    for options in ({"system": 5}, {"system": "\ud800"}, {"stop": ""}):
        with pytest.raises(InputError):
            generator.chat(**options)  # type: ignore[arg-type]


def test_reset_keeps_the_system_message_and_ends_the_answer(generator: TextGenerator) -> None:
    conversation = generator.chat(system="Be.", **CHAT)
    answer = conversation.say("ab")
    next(answer)
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Be."}]
    with pytest.raises(ClosedError, match="reset"):
        next(answer)
    assert conversation.statistics().turns == conversation.statistics().tokens == 0


def test_messages_are_copies(generator: TextGenerator) -> None:
    conversation = generator.chat(**CHAT)
    said(conversation, "ab")
    conversation.messages[0]["content"] = "changed"
    conversation.messages.clear()
    assert conversation.messages[0]["content"] == "ab"


# ------------------------------------------------------------------------------------------- files


def test_save_and_load(generator: TextGenerator, tmp_path: Path) -> None:
    conversation = generator.chat(system="Sé 🙂.\n", **CHAT)
    said(conversation, "the end")
    answer = conversation.say("más\x1b")
    next(answer)
    file = tmp_path / "talk.json"
    conversation.save(file)
    messages = conversation.messages
    assert json.loads(file.read_text())["messages"] == messages
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]
    other = generator.chat(**CHAT)
    other.load(str(file))
    assert other.messages == messages
    conversation.load(file)
    assert conversation.messages == messages
    assert said(conversation, "and then") == said(other, "and then")
    with pytest.raises(OSError, match="No such file"):
        conversation.save(tmp_path / "no" / "folder.json")


@pytest.mark.skipif(os.name != "posix", reason="of links and modes that POSIX has")
def test_what_stood_where_a_conversation_is_saved(generator: TextGenerator, tmp_path: Path) -> None:
    conversation = generator.chat(**CHAT)
    said(conversation, "the end")
    file, link = tmp_path / "talk.json", tmp_path / "link"
    file.write_text("older")
    file.chmod(0o600)
    link.symlink_to(file)
    conversation.save(link)
    assert link.is_symlink()
    assert json.loads(file.read_text())["messages"] == conversation.messages
    assert file.stat().st_mode & 0o777 == 0o600, "what was kept from others is kept from them"
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    with pytest.raises(OSError, match="symbolic links"):
        conversation.save(circle)
    assert circle.is_symlink()


def of(*roles: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": role, "content": "x"} for role in roles]
    return {"format": "ostinato conversation", "version": 1, "messages": messages, **more}


STRANGERS: list[tuple[Any, str]] = [
    (b"", "not JSON"),
    (b"\xff\xfe", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b"9" * 10_000, "not JSON"),
    (b"[]", "must be an object"),
    (b"{}", "no saved conversation"),
    (of("user", "assistant", version=2), "version 2"),
    (of("user", "assistant", version=True), "version True"),
    (of(messages="x"), "messages is 'x'"),
    (of(messages=["x"]), "message 0 is 'x'"),
    (of(messages=[{"role": "user"}]), "must have a role and a content"),
    (of(messages=[{"role": "user", "content": "x", "more": 1}]), "must have a role"),
    (of(messages=[{"role": 1, "content": "x"}]), "role 1 is not"),
    (of(messages=[{"role": ["user"], "content": "x"}]), "role"),
    (of("tool"), "role 'tool' is not"),
    (of(messages=[{"role": "user", "content": 5}]), "content is 5"),
    (of(messages=[{"role": "user", "content": "\udce9"}]), "lone surrogate"),
    (of("user"), "in turns"),
    (of("assistant", "user"), "in turns"),
    (of("user", "assistant", "system"), "in turns"),
    (of("user", "user", "assistant", "assistant"), "in turns"),
    (b'{"format": "' + b"x" * (5 << 20) + b'"}', "more than"),
]


def test_a_strangers_file_is_refused_and_changes_nothing(
    generator: TextGenerator, tmp_path: Path
) -> None:
    conversation = generator.chat(**CHAT)
    said(conversation, "ab")
    before, file = conversation.messages, tmp_path / "file"
    for content, words in STRANGERS:
        file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        with pytest.raises(ModelFormatError, match=words) as caught:
            conversation.load(file)
        assert str(caught.value).startswith(str(file)) and len(str(caught.value)) < 2000
        assert conversation.messages == before


def test_a_file_may_hold_no_turn_yet(generator: TextGenerator, tmp_path: Path) -> None:
    conversation = generator.chat(system="Be.")
    conversation.save(tmp_path / "x")
    other = generator.chat()
    other.load(tmp_path / "x")
    assert other.messages == conversation.messages == [{"role": "system", "content": "Be."}]
    with pytest.raises(ModelFormatError, match="no regular file"):
        other.load(tmp_path)


def test_what_generates_shows_its_state(generator: TextGenerator) -> None:
    decoder, conversation = generator.decoder, generator.chat(**CHAT)
    assert repr(conversation) == "<Conversation of 0 messages>"
    answer = conversation.say("the end")
    prompt = answer.prompt_tokens
    assert repr(answer) == f"<Generation: 0 tokens after a prompt of {prompt}, interrupted>"
    list(answer)
    shown = f"{len(answer.token_ids)} tokens after a prompt of {prompt}, {answer.finish_reason}"
    assert repr(answer) == f"<Generation: {shown}>"
    assert repr(conversation) == "<Conversation of 2 messages>"
    decoder.reset()
    decoder.prefill([5])
    run = decoder.run()
    assert repr(run) == "<TokenRun of 1 sequences, open>"
    decoder.decode()
    assert repr(run) == "<TokenRun of 1 sequences, ended by decode()>"
    run = decoder.run()
    run.close()
    assert repr(run) == "<TokenRun of 1 sequences, over>"
    assert repr(generator).startswith("<TextGenerator of <Decoder of ")
    assert f"of {generator.tokenizer.vocabulary} tokens" in repr(generator)
    generator.close()
    assert repr(decoder).endswith(", closed>")
