"""Text generation: a prompt in, an iterator over pieces of the answer out, and a summary.

with TextGenerator(device, "smollm2-135m") as generator:
    answer = generator.generate("Why is the sky blue?", max_tokens=64)
    for piece in answer:
        print(piece, end="", flush=True)
    print(answer.summary())
    conversation = generator.chat(system="Be brief.")
    for piece in conversation.say("And at night?"):
        print(piece, end="", flush=True)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ostinato import Device
from ostinato.driver.closeable import Closeable
from ostinato.errors import InputError
from ostinato.models.arguments import quoted, require_function, token_ids, whole
from ostinato.models.conversation import MAX_ANSWER, Conversation
from ostinato.models.decoder import Decoder
from ostinato.models.files.advice import read_advice
from ostinato.models.files.checkpoint import Checkpoint
from ostinato.models.files.open import open_checkpoint
from ostinato.models.generation import Generation
from ostinato.models.run import RunOptions
from ostinato.models.sampling import GREEDY, SamplingOptions, require_options
from ostinato.models.stop_strings import checked_stops
from ostinato.models.text.chat import DEFAULT_TEMPLATE, NO_ARGS, ChatTemplate, prepare
from ostinato.models.text.tokenizer import Tokenizer, load_tokenizer, read_chat_templates


class TextGenerator(Closeable):
    """A decoder with its tokenizer and chat template.

    `model`: the path of a GGUF file or a folder; a known name ("smollm2-135m") or a Hugging Face
    id as str, fetched on first use; or an open checkpoint, which the caller closes.  Other options
    are those of `Decoder`.
    Raises the errors of `Decoder`, InputError for an unknown name, and DownloadError.
    """

    def __init__(self, device: Device, model: str | Path | Checkpoint, **options: Any) -> None:
        began = time.perf_counter()
        self.device = device
        checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(_resolve(model))
        try:
            # The tokenizer is built while the weights are read: these two take most of the time.
            loading: Future[Tokenizer] = Future()
            # Not a thread of a pool: Ctrl-C could not interrupt the wait for its end.
            threading.Thread(
                target=_load_tokenizer, args=(checkpoint, loading), name="tokenizer", daemon=True
            ).start()
            self._advice = read_advice(checkpoint.tokenizer)
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
        """The generation that owns the decoder's sequence; earlier ones have ended."""

    def __repr__(self) -> str:
        return f"<TextGenerator of {self.decoder!r} and {self.tokenizer!r}>"

    @property
    def chats(self) -> bool:
        """True if the model has a chat template."""
        return self.tokenizer.chat_template is not None

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template; ChatML for a model without one."""
        source = self.tokenizer.chat_template
        return ChatTemplate(
            DEFAULT_TEMPLATE if source is None else source,
            where=f"{self.tokenizer.where}: the chat template",
            tokens=self.tokenizer.special_tokens,
            with_tools=self.tokenizer.tool_template,
        )

    @property
    def default_sampling(self) -> SamplingOptions:
        """The default sampling options of `ostinato chat` and `ostinato serve`.

        They are the model's own: `general.sampling.` in GGUF metadata, generation_config.json in a
        folder; an option missing there is off, and the temperature 1.  A model without any gets
        temperature 0.7, min_p 0.05, repetition_penalty 1.1.  Raises ModelFormatError for invalid
        values.
        """
        return self._advice.options()

    def encode(
        self,
        prompt: str | Items[Mapping[str, str]],
        *,
        chat: bool | None = None,
        system: str | None = None,
        template_args: Mapping[str, object] = NO_ARGS,
        continue_last: bool = False,
    ) -> list[int]:
        """Returns the prompt's token ids; a chat is rendered with the chat template first.

        A list of messages (mappings with `role` and `content`) is always a chat; a text is a chat
        if `chat` is True, or if it is None and the model has a template.  `system`: a first
        message.  `template_args`: variables of the template, such as `enable_thinking`, of types
        that JSON can hold.  `continue_last`: the answer continues the last message, an assistant's.
        Raises InputError for another prompt, and the errors of `ChatTemplate.render` and
        `Tokenizer.encode`.
        """
        if system is not None and not isinstance(system, str):
            raise InputError(f"system is {quoted(system)}, must be text")
        if isinstance(prompt, str):
            if not (self.chats if chat is None else chat):
                if system is not None:
                    raise InputError("a system message needs a chat, and this prompt is raw")
                if template_args or continue_last:
                    raise InputError(
                        "template_args and continue_last need a chat, and this prompt is raw"
                    )
                return self.tokenizer.encode(prompt)
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, Mapping | bytes) or not isinstance(prompt, Iterable):
            raise InputError(f"prompt is {quoted(prompt)}, must be text or a list of messages")
        first = [] if system is None else [{"role": "system", "content": system}]
        text = self.chat_template.render(
            [*first, *prompt], continue_last=continue_last, variables=template_args
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
        template_args: Mapping[str, object] = NO_ARGS,
        continue_last: bool = False,
        tokens_per_launch: int = 1,
        stop: str | Iterable[str] = (),
        reuse: bool = False,
        logprobs: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Generation:
        """Returns the answer to a prompt (text, messages, or token ids): an iterator over pieces.

        `chat`, `system`, `template_args` and `continue_last`: see `encode`.  With token ids, `chat`
        means that the answer is a turn of a chat; otherwise the answer continues their text, and
        keeps the space that SentencePiece writes before all text.  The answer ends at an end token,
        after `max_tokens` tokens, where the context is full, or before the first occurrence of a
        text in `stop`; no part of that text is yielded.
        `tokens_per_launch`: see `Decoder.run`.  `reuse`: the common prefix of the prompt and the
        tokens in the KV cache is not read again; without, the whole prompt is read, so that the
        same prompt gives the same bits whatever came before.  `logprobs`: `Generation.logprobs` has
        each token with so many of the likeliest ones at its place, 0 to 20; None for none.
        `progress`: see `Decoder.prefill`.

        A generator has one generation at a time: a new one, or any other use of the decoder, ends
        it, and its next step then raises ClosedError.  Raises InputError for a prompt that does not
        fit in the context, an item that is neither a message nor a token of the vocabulary, or
        invalid options.
        """
        max_tokens = whole(max_tokens, "max_tokens", 1)
        require_options(sampling, "sampling")
        require_function(progress, "progress")
        ring = self.decoder.plan.sizes.ring
        per_launch = RunOptions(tokens_per_launch=tokens_per_launch).checked(ring).tokens_per_launch
        templated = {"template_args": template_args, "continue_last": continue_last}
        tokens, chatted = self._tokens(prompt, chat, system, templated)
        context = self.decoder.plan.sizes.context
        if len(tokens) > context:
            raise InputError(
                f"the prompt has {len(tokens)} tokens, more than the context of {context}; "
                "shorten it, or raise max_context"
            )
        stops = checked_stops(stop)
        cached = 0
        if reuse:
            cached = self.decoder.keep_common(tokens)
        else:
            self.decoder.reset(0)
        # The last token takes the position after all others: prompt + max_tokens - 1.
        self.decoder.set_sampling(
            sampling,
            limit=len(tokens) + max_tokens - 1,
            answer=len(tokens),
            logprobs=logprobs,
        )
        self.latest = Generation(
            self,
            tokens,
            sampling=sampling,
            cached=cached,
            stops=stops,
            continues=continue_last or not chatted,
            tokens_per_launch=per_launch,
            with_logprobs=logprobs is not None,
            progress=progress,
        )
        return self.latest

    def chat(
        self,
        *,
        system: str | None = None,
        template_args: Mapping[str, object] = NO_ARGS,
        max_tokens: int = MAX_ANSWER,
        sampling: SamplingOptions = GREEDY,
        stop: str | Iterable[str] = (),
        tokens_per_launch: int = 1,
    ) -> Conversation:
        """Returns a conversation that keeps its KV cache between turns; options as for `generate`.

        Greedy answers of a small model repeat themselves: `sampling=generator.default_sampling`
        samples as `ostinato chat` does.  A model without a chat template gets ChatML.  Raises
        InputError for a `system` message that is no text.
        """
        return Conversation(
            self,
            system=system,
            template_args=template_args,
            max_tokens=max_tokens,
            sampling=sampling,
            stop=stop,
            tokens_per_launch=tokens_per_launch,
        )

    def _tokens(
        self,
        prompt: str | Items[Mapping[str, str]] | Items[int],
        chat: bool | None,
        system: str | None,
        templated: Mapping[str, Any],
    ) -> tuple[list[int], bool]:
        """Returns the prompt's tokens, and True for a chat or False for text that the answer
        continues."""
        if isinstance(prompt, str):
            chatted = self.chats if chat is None else bool(chat)
            tokens = self.encode(prompt, chat=chat, system=system, **templated)
        elif isinstance(prompt, Mapping | bytes | bytearray) or not isinstance(prompt, Iterable):
            raise InputError(f"prompt is {quoted(prompt)}, must be text, messages or token ids")
        else:
            items = list(prompt)
            messages = [item for item in items if isinstance(item, Mapping)]
            if messages and len(messages) < len(items):
                raise InputError("the prompt mixes messages and token ids")
            if messages:
                chatted = True
                tokens = self.encode(messages, chat=chat, system=system, **templated)
            else:
                if any(templated.values()):
                    raise InputError("template_args and continue_last need text or messages")
                chatted = bool(chat)
                tokens = token_ids(items, self.decoder.config.vocabulary, "prompt")
        if not tokens:
            raise InputError("the prompt is empty: it has no tokens")
        return tokens, chatted

    def close(self) -> None:
        """Closes the decoder and frees its memory.  Idempotent."""
        self.decoder.close()


def _load_tokenizer(checkpoint: Checkpoint, loading: Future[Tokenizer]) -> None:
    source = checkpoint.tokenizer
    try:
        if read_chat_templates(source):
            prepare()  # starts the renderer's process while the tokenizer is built
        loading.set_result(load_tokenizer(source, vocabulary=checkpoint.config.vocabulary))
    except BaseException as error:
        loading.set_exception(error)


def _resolve(model: str | Path) -> str | Path:
    if isinstance(model, Path):
        return model
    from ostinato.models.files.store import resolve

    return resolve(model)
