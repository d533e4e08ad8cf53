"""Text in, text out: a prompt becomes pieces of an answer as they come, and a summary.

with TextGenerator(device, "smollm2-135m") as generator:
    answer = generator.generate("Why is the sky blue?", max_tokens=64)
    for piece in answer:
        print(piece, end="", flush=True)
    print(answer.summary())
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ostinato import Device
from ostinato.driver.closeable import Closeable
from ostinato.errors import ClosedError, InputError
from ostinato.models.arguments import quoted, token_ids, whole
from ostinato.models.chat import DEFAULT_TEMPLATE, ChatTemplate, prepare
from ostinato.models.checkpoint import Checkpoint, open_checkpoint
from ostinato.models.decoder import Decoder
from ostinato.models.run import RunOptions
from ostinato.models.sampling import GREEDY, SamplingOptions
from ostinato.models.tokenizer import (
    IncrementalDecoder,
    Tokenizer,
    load_tokenizer,
    read_chat_template,
)

__all__ = ["Generation", "Summary", "TextGenerator"]


@dataclass(frozen=True, slots=True)
class Summary:
    """What one generation was.

    `finish_reason`: "stop" (an end token), "length" (`max_tokens`), "context" (no room left),
    "interrupted" (by the caller, or still under way).  `token_ids`: what was chosen, the end token
    too.  `tokens_per_second`: of decoding, so from the first token on; 0 if there was no second.
    `prompt_tokens_per_second`: of the prompt.  `time_to_first_token`: seconds from `generate` on.

    `launches_eager`, `launches_replayed`, `graphs_captured`, `eager_reasons`: of this generation;
    one graph launch stands for `launches_per_token` eager ones or, with `tokens_per_launch`, for
    so many times more.  `one_by_one`: why tokens came in other ways than asked (see
    `DecoderStatistics`).  `load_seconds`: of the model, once
    for all generations.  `library`: what multiplies besides our kernels, or why nothing does.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    tokens_per_second: float
    prompt_tokens_per_second: float
    time_to_first_token: float
    load_seconds: float
    launches_eager: int
    launches_replayed: int
    launches_per_token: int
    tokens_per_launch: int
    graphs_captured: int
    device: str
    eager_reasons: dict[str, int]
    one_by_one: dict[str, int]
    library: str

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON takes them."""
        return {**asdict(self), "token_ids": list(self.token_ids)}

    def __str__(self) -> str:
        lines = [
            f"{len(self.token_ids)} tokens ({self.finish_reason}) at "
            f"{self.tokens_per_second:.1f} tokens/s, first after {self.time_to_first_token:.2f} s; "
            f"prompt {self.prompt_tokens} tokens at {self.prompt_tokens_per_second:.0f} tokens/s; "
            f"model loaded in {self.load_seconds:.2f} s",
            f"launches: {self.launches_eager} eager, {self.launches_replayed} of graphs "
            f"(each in place of up to {self.launches_per_token * self.tokens_per_launch}); "
            f"{self.graphs_captured} graphs captured; device {self.device}",
        ]
        lines += [f"eager: {count} x {reason}" for reason, count in self.eager_reasons.items()]
        lines += [f"token by token: {reason}" for reason in self.one_by_one]
        if self.library.startswith("not used: "):
            lines.append(f"cuBLASLt {self.library}")
        return "\n".join(lines)


class Generation:
    """One answer: an iterator over pieces of text, and its summary so far.

    No piece holds part of a character.  An exception in the middle (Ctrl-C too) goes to the caller;
    `text`, `token_ids` and `summary()` then say how far it came, and the generator can be used
    again.
    """

    def __init__(
        self, generator: TextGenerator, prompt: Items[int], *, tokens_per_launch: int = 1
    ) -> None:
        self._generator = generator
        self._prompt = tuple(prompt)
        self._per_launch = tokens_per_launch
        self._before = generator.decoder.statistics()
        self._began = time.perf_counter()
        self._first = self._last = 0.0
        self._pieces: list[str] = []
        self._tokens: list[int] = []
        self._reason = "interrupted"
        self._work = self._run()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._generator.latest is not self and self._reason == "interrupted":
            raise ClosedError("a later generation ended this one; the decoder holds its tokens now")
        return next(self._work)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens chosen so far."""
        return tuple(self._tokens)

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    def _run(self) -> Iterator[str]:
        decoder = self._generator.decoder
        out = self._generator.tokenizer.stream_decoder()
        piece, ended = self._next(out, decoder.prefill(self._prompt))
        if piece:
            yield piece
        if ended:
            return
        # The next tokens are under way while the caller has a piece in its hands.
        with decoder.run(tokens_per_launch=self._per_launch) as tokens:
            for token in tokens:
                piece, _ = self._next(out, token)
                if piece:
                    yield piece

    def _next(self, out: IncrementalDecoder, token: int) -> tuple[str, bool]:
        """Takes a token: its piece of text, and whether it is the last."""
        decoder = self._generator.decoder
        self._last = time.perf_counter()
        self._first = self._first or self._last
        self._tokens.append(token)
        piece, ended = out.push(token), token in decoder.stop_tokens
        over = ended or decoder.stopped()
        if over:
            full = len(self._prompt) + len(self._tokens) > decoder.plan.sizes.context
            length = "context" if full else "length"
            # Set before the last piece: whoever takes it may not ask for another.
            self._reason = "stop" if ended else length
            piece += out.finish()
        if piece:
            self._pieces.append(piece)
        return piece, over

    def summary(self) -> Summary:
        """The numbers so far; complete once the iteration has ended."""
        now, before = self._generator.decoder.statistics(), self._before
        decoded, spent = len(self._tokens) - 1, self._last - self._first
        prefill = now.prefill_seconds - before.prefill_seconds
        return Summary(
            text=self.text,
            token_ids=self.token_ids,
            finish_reason=self._reason,
            prompt_tokens=len(self._prompt),
            tokens_per_second=decoded / spent if decoded > 0 and spent > 0 else 0.0,
            prompt_tokens_per_second=len(self._prompt) / prefill if self._tokens else 0.0,
            time_to_first_token=self._first - self._began if self._tokens else 0.0,
            load_seconds=self._generator.load_seconds,
            launches_eager=now.launches_eager - before.launches_eager,
            launches_replayed=now.launches_replayed - before.launches_replayed,
            launches_per_token=now.launches_per_token,
            tokens_per_launch=self._per_launch,
            graphs_captured=now.graphs_captured - before.graphs_captured,
            device=self._generator.device.name,
            eager_reasons=_since(before.eager_reasons, now.eager_reasons),
            one_by_one=_since(before.one_by_one, now.one_by_one),
            library=now.library,
        )


def _since(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """What was counted in between."""
    counts = {reason: count - before.get(reason, 0) for reason, count in now.items()}
    return {reason: count for reason, count in counts.items() if count}


class TextGenerator(Closeable):
    """A decoder with its tokenizer and chat template.

    `model`: a GGUF file or a folder, a known name (fetched on first use, see `models.store`), or an
    open checkpoint.  Other options are the decoder's.  Raises what `Decoder` raises, and
    DownloadError.
    """

    def __init__(self, device: Device, model: str | Path | Checkpoint, **options: Any) -> None:
        began = time.perf_counter()
        self.device = device
        checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(_resolve(model))
        try:
            # The tokenizer is built while the weights are read: both take longer than the rest.
            loading: Future[Tokenizer] = Future()
            # Not a pool's thread: nobody would be able to interrupt the wait for its end.
            threading.Thread(
                target=_load_tokenizer, args=(checkpoint, loading), name="tokenizer", daemon=True
            ).start()
            self.decoder = Decoder(device, checkpoint, **options)
            try:
                self.tokenizer = loading.result()
                if options.get("stop_tokens") is None:
                    self.decoder.set_stop_tokens(
                        (*self.tokenizer.eos_ids, *checkpoint.config.eos_token_ids)
                    )
            except BaseException:
                self.decoder.close()
                raise
        finally:
            if checkpoint is not model:
                checkpoint.close()
        self.load_seconds = time.perf_counter() - began
        self.latest: Generation | None = None
        """The generation that the decoder is at; those before it are over."""

    @property
    def chats(self) -> bool:
        """Whether the model brings a chat template."""
        return self.tokenizer.chat_template is not None

    def encode(
        self,
        prompt: str | Items[Mapping[str, str]],
        *,
        chat: bool | None = None,
        system: str | None = None,
    ) -> list[int]:
        """The prompt's token ids: `chat` through the chat template, else as it is.

        A list of messages (mappings with `role` and `content`) is always a chat; a text is one if
        `chat` says so, or by itself (None) if the model has a template.  `system`: a first message.
        Raises InputError for another prompt, and what `ChatTemplate.render` and `Tokenizer.encode`
        raise.
        """
        if system is not None and not isinstance(system, str):
            raise InputError(f"system is {quoted(system)}, must be text")
        if isinstance(prompt, str):
            if not (self.chats if chat is None else chat):
                if system is not None:
                    raise InputError("a system message needs a chat, and this prompt is raw")
                return self.tokenizer.encode(prompt)
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, Mapping | bytes) or not isinstance(prompt, Iterable):
            raise InputError(f"prompt is {quoted(prompt)}, must be text or a list of messages")
        first = [] if system is None else [{"role": "system", "content": system}]
        source = self.tokenizer.chat_template
        template = ChatTemplate(
            DEFAULT_TEMPLATE if source is None else source,
            where=f"{self.tokenizer.where}: the chat template",
        )
        bos, eos = self.tokenizer.bos_id, self.tokenizer.eos_ids
        text = template.render(
            [*first, *prompt],
            bos_token="" if bos is None else self.tokenizer.token_text(bos) or "",
            eos_token=self.tokenizer.token_text(eos[0]) or "" if eos else "",
        )
        return self.tokenizer.encode(text, add_special=False)

    def generate(
        self,
        prompt: str | Items[Mapping[str, str]] | Items[int],
        *,
        max_tokens: int = 256,
        sampling: SamplingOptions = GREEDY,
        chat: bool | None = None,
        system: str | None = None,
        tokens_per_launch: int = 1,
    ) -> Generation:
        """The answer to a prompt (text, messages, or token ids), as an iterator over its pieces.

        It ends at an end token, after `max_tokens` tokens, or where the context is full.
        `tokens_per_launch` as for `Decoder.run`.  One generation at a time: a new one ends the one
        before, whose next step then raises ClosedError.  Raises InputError if the prompt
        leaves no room in the context, holds anything that is neither a message nor a token of the
        vocabulary, or for options that make no sense.
        """
        max_tokens = whole(max_tokens, "max_tokens", 1)
        ring = self.decoder.plan.sizes.ring
        per_launch = RunOptions(tokens_per_launch=tokens_per_launch).checked(ring).tokens_per_launch
        tokens = self._tokens(prompt, chat, system)
        context = self.decoder.plan.sizes.context
        if len(tokens) > context:
            raise InputError(
                f"the prompt has {len(tokens)} tokens, more than the context of {context}; "
                "shorten it, or raise max_context"
            )
        self.decoder.reset()
        # The last token takes the position after all others: prompt + max_tokens - 1.
        self.decoder.set_sampling(sampling, limit=len(tokens) + max_tokens - 1)
        self.latest = Generation(self, tokens, tokens_per_launch=per_launch)
        return self.latest

    def _tokens(
        self,
        prompt: str | Items[Mapping[str, str]] | Items[int],
        chat: bool | None,
        system: str | None,
    ) -> list[int]:
        if isinstance(prompt, str):
            tokens = self.encode(prompt, chat=chat, system=system)
        elif isinstance(prompt, Mapping | bytes | bytearray) or not isinstance(prompt, Iterable):
            raise InputError(f"prompt is {quoted(prompt)}, must be text, messages or token ids")
        else:
            items = list(prompt)
            messages = [item for item in items if isinstance(item, Mapping)]
            if messages and len(messages) < len(items):
                raise InputError("the prompt mixes messages and token ids")
            if messages:
                tokens = self.encode(messages, chat=chat, system=system)
            else:
                tokens = token_ids(items, self.decoder.config.vocabulary, "prompt")
        if not tokens:
            raise InputError("the prompt is empty: it has no tokens")
        return tokens

    def close(self) -> None:
        """Gives the decoder's memory back.  Idempotent."""
        self.decoder.close()


def _load_tokenizer(checkpoint: Checkpoint, loading: Future[Tokenizer]) -> None:
    source = checkpoint.tokenizer
    try:
        if read_chat_template(source) is not None:
            prepare()  # the renderer starts meanwhile
        loading.set_result(load_tokenizer(source, vocabulary=checkpoint.config.vocabulary))
    except BaseException as error:
        loading.set_exception(error)


def _resolve(model: str | Path) -> str | Path:
    if isinstance(model, Path):
        return model
    from ostinato.models.store import resolve

    return resolve(model)
