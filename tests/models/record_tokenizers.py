"""Records what transformers makes of tokenizers and chat templates in Hugging Face folders:

    python -m tests.models.record_tokenizers      (transformers and jinja2; writes tests/data)

`folders` describes small folders by their files; the record holds, for each, the named special
tokens, ids of some texts and checks of many with the text that comes back, and what chat templates
render.  test_tokenizer.py writes the same folders without transformers; with it,
test_beside_transformers.py compares other texts and random folders.
"""

from __future__ import annotations

import json
import random
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.models.model_files import TEMPLATE, byte_level_encoder

RECORD = Path(__file__).parents[1] / "data" / "reference_tokenizers.json"
SHOWN = 6
"""Texts whose ids are in the record; of others there is a check."""
MUCH = ("prepended, ", "prepended, legacy True", "mistral", "all names", "qwen2, Qwen2Tokenizer")
"""Folders with 500 texts, one for each kind of tokenizer; others have 40."""

_PIECES = [
    "▁", "h", "e", "l", "o", "w", "r", "d", "i", "he", "ll", "hell", "llo", "hello", "▁hello",
    "▁w", "or", "ld", "▁wor", "▁world", ".", "▁hi", "hi",
]  # fmt: skip
_MERGES = [
    "h e", "l l", "he ll", "ll o", "he llo", "hell o", "▁ hello",
    "▁ w", "o r", "l d", "▁w or", "▁wor ld", "h i", "▁ hi",
]  # fmt: skip
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPACES = {
    "prepended": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
    },
    "metaspace": {
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": "always",
            "split": False,
        },
    },
}
"""How a SentencePiece tokenizer.json puts spaces: as Llama 2's does, or in the newer way."""


def added(text: str, **flags: bool) -> dict[str, object]:
    """A token with all of its flags, as tokenizer_config.json lists it."""
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {"content": text, **dict.fromkeys(names, False), "special": True, **flags}


def sentencepiece_json(spaces: str, **changes: object) -> dict[str, Any]:
    """A tokenizer.json in Llama 2's way."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES]
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, **added(texts[i])} for i in range(3)],
        **SPACES[spaces],
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {text: i for i, text in enumerate(texts)},
            "merges": _MERGES,
        },
        **changes,
    }


def byte_level_json(**changes: object) -> dict[str, Any]:
    """SmolLM2's kind of tokenizer.json, without its way with digits."""
    made: dict[str, Any] = json.loads(byte_level_encoder().to_str())
    made["pre_tokenizer"] = made["pre_tokenizer"]["pretokenizers"][1]
    return {**made, **changes}


def qwen_json() -> dict[str, Any]:
    """Qwen2's kind."""
    split = {"type": "Split", "pattern": {"Regex": QWEN2}, "behavior": "Isolated", "invert": False}
    byte_level = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False,
    }  # fmt: skip
    steps = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    return byte_level_json(normalizer={"type": "NFC"}, pre_tokenizer=steps)


def folders() -> dict[str, dict[str, Any]]:
    """Names of files to their JSON, by what a folder shows."""
    made: dict[str, dict[str, Any]] = {}

    def folder(name: str, tokenizer: dict[str, Any], config: object, /, **files: Any) -> None:
        files.setdefault("config", {"model_type": "llama"})
        if config is not None:
            files["tokenizer_config"] = config
        made[name] = {"tokenizer": tokenizer, **files}

    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    for spaces in SPACES:
        made_by = {"tokenizer_class": "LlamaTokenizerFast", **ends}
        for legacy in ({}, {"legacy": True}, {"legacy": False}, {"legacy": None}):
            for prefix in ({}, {"add_prefix_space": False}, {"add_prefix_space": True}):
                words = ", ".join(f"{k} {v}" for k, v in {**legacy, **prefix}.items())
                folder(
                    f"{spaces}, {words}",
                    sentencepiece_json(spaces),
                    {**made_by, **legacy, **prefix},
                )
        other = {"tokenizer_class": "PreTrainedTokenizerFast", **ends, "legacy": False}
        folder(f"{spaces}, another class", sentencepiece_json(spaces), other)
    llama = {"tokenizer_class": "LlamaTokenizer"}
    spm = sentencepiece_json("prepended")
    folder("llama without a class", spm, ends)
    folder("llama, a class in config.json", spm, ends, config={"model_type": "llama", **llama})
    folder("llama, no names", spm, llama)
    for legacy in ({}, {"legacy": True, "eot_token": None}):
        code = {"tokenizer_class": "CodeLlamaTokenizer", **legacy}
        folder(f"code llama, {legacy}", spm, code)
    folder("llama, begin is null", spm, {**llama, "bos_token": None})
    folder("mistral", spm, {**llama, **ends}, config={"model_type": "mistral"})
    folder("qwen3 of llama's class", spm, {**llama, **ends}, config={"model_type": "qwen3"})
    more = sentencepiece_json("prepended")
    more["added_tokens"].append({"id": 282, **added("<|tool|>", special=False, normalized=True)})
    folder("a normalized token", more, {"tokenizer_class": "PreTrainedTokenizerFast", **ends})
    tool = {"282": added("<|tool|>"), **{str(i): added(t) for i, t in enumerate(
        ("<unk>", "<s>", "</s>"))}}  # fmt: skip
    folder("llama, listed tokens", spm, {**llama, **ends, "added_tokens_decoder": tool})

    plain, fast = byte_level_json(), {"tokenizer_class": "PreTrainedTokenizerFast"}
    start, end = "<|im_start|>", "<|im_end|>"
    seven = {
        "bos_token": start, "eos_token": end, "unk_token": "<unused0>", "sep_token": "<sep>",
        "pad_token": "<unused1>", "cls_token": "<cls>", "mask_token": None,
    }  # fmt: skip
    folder("all names", plain, {**fast, **seven, "image_token": "<image>", "add_bos_token": True})
    folder("extra list", plain, {**fast, "extra_special_tokens": ["<unused2>", "<more>"]})
    folder("older list", plain, {**fast, "additional_special_tokens": ["<unused2>", "<more>"]})
    extra = {"audio_token": "<audio>", "image_token": "<unused3>"}
    folder("extra table", plain, {**fast, **seven, "extra_special_tokens": extra})
    mask = {"__type": "AddedToken", **added("<mask>", lstrip=True)}
    folder("a token of flags", plain, {**fast, "eos_token": end, "mask_token": mask})
    listed = {"280": added("<|tool|>"), "281": added("<pad>", special=False)}
    config = {**fast, "pad_token": "<pad>", "added_tokens_decoder": listed}
    older = {"special_tokens_map": {"bos_token": start, "pad_token": "<unused4>"}}
    folder("listed tokens, and an older file", plain, config, **older)
    flags = {"content": "<unused4>", "lstrip": True, "normalized": False, "rstrip": False,
             "single_word": False}  # fmt: skip
    everything = {
        "bos_token": start, "eos_token": {**flags, "content": end}, "pad_token": flags,
        "image_token": "<unused5>", "additional_special_tokens": ["<unused6>", "<more>"],
    }  # fmt: skip
    folder("an older file alone", plain, None, special_tokens_map=everything)
    folder("an older file first", plain, {**fast, **seven}, special_tokens_map=everything)
    two = {"extra_special_tokens": ["<unused7>"], "eos_token": end}
    older = {"special_tokens_map": {"extra_special_tokens": ["<unused8>"]}}
    folder("extra tokens of two files", plain, {**fast, **two}, **older)
    table = {"special_tokens_map": {"extra_special_tokens": {"video_token": "<unused8>"}}}
    folder("an extra table of an older file", plain, {**fast, **seven}, **table)
    more = {"added_tokens": {"<|tool|>": 280, "<|other|>": 281}}
    folder("added tokens", plain, {**fast, "eos_token": "<|tool|>"}, **more)
    begin = {"config": {"model_type": "llama", "bos_token_id": 1, "eos_token_id": 2}}
    folder("begin in config.json", plain, {**fast, "eos_token": end}, **begin)
    padding = {
        "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 2, "pad_type_id": 0, "pad_token": "<unused9>",
    }  # fmt: skip
    folder("padding", byte_level_json(padding=padding), fast)
    folder("padding, a name", byte_level_json(padding=padding), {**fast, "pad_token": start})
    folder("padding, null", byte_level_json(padding=padding), {**fast, "pad_token": None})
    folder("GPT2Tokenizer", plain, {"tokenizer_class": "GPT2Tokenizer", "bos_token": start})
    old = {**fast, "tokenizer_class": "LlamaTokenizerFast", "eos_token": end}
    folder("byte-level, LlamaTokenizerFast", plain, old)
    told = byte_level_json()
    told["added_tokens"][2]["special"] = False
    folder("a name makes a token special", told, {**fast, "eos_token": end})
    flagged = byte_level_json()
    flagged["added_tokens"][1]["lstrip"] = flagged["added_tokens"][2]["rstrip"] = True
    folder("flags of two files", flagged, {**fast, "pad_token": mask, "mask_token": "<mask>"})
    folder("split special tokens", plain, {**fast, "eos_token": end, "split_special_tokens": True})
    qwen = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": end, "bos_token": None}
    stripped = {**qwen_json(), "added_tokens": flagged["added_tokens"]}
    folder("qwen2, flags", stripped, qwen, config={"model_type": "qwen2"})
    for kind in ("qwen2", "qwen3"):
        for given in ("Qwen2Tokenizer", "PreTrainedTokenizerFast", None):
            config = {"bos_token": None, "eos_token": end}
            config |= {} if given is None else {"tokenizer_class": given}
            folder(f"{kind}, {given}", qwen_json(), config, config={"model_type": kind})
    return made


def write(folder: Path, files: Mapping[str, object]) -> None:
    """Writes one of `folders`."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


_WORDS = [
    *_PIECES, "▁", "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|tool|>", "<|other|>",
    "<sep>", "<image>", "<more>", "<mask>", "<pad>", "<video>", "<audio>", "<cls>", "the", "in",
    "er", "ab", "12", "121", "7", "'S", "'t", "é", "東", "🎉", "ＡＢ", "//", ",",
    *(f"<unused{i}>" for i in range(11)), " ", "  ", "\n", "\t", "\r\n", "\u00a0", "e\u0301",
]  # fmt: skip


def texts(name: str) -> Iterator[str]:
    """Texts for a folder, the first ones by hand, then random ones, the same for the same name."""
    chance = random.Random(name)
    yield from ("", " hi", "<s>hi", "hello world.", " <unused1> a <mask> b")
    for _ in range(495 if name in MUCH else 35):
        words = chance.choices(_WORDS, k=chance.randrange(1, 12))
        yield chance.choice(("", " ")).join(words)


def check(ids: list[int], *texts: str) -> int:
    """A number that stands for ids and the texts that come back."""
    return zlib.crc32(json.dumps([ids, *texts]).encode())


NAMES = (
    "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ sep_token }}|{{ pad_token }}"
    "|{{ cls_token }}|{{ mask_token }}|{{ image_token }}|{{ audio_token }}|{{ video_token }}"
    "|{{ bos_token is defined }}|{{ pad_token is defined }}|{{ unk_token is defined }}"
)
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Größe\n2 < 3?\n"},
    {"role": "assistant", "content": "Yes. <think>hm</think>\n\nso"},
    {"role": "user", "content": "Why?"},
]
FEATURES = (
    TEMPLATE,
    NAMES,
    "{{ bos_token + messages[0]['content'] }}",
    "{{ sep_token + 'x' }}",
    "{{ pad_token | default('none') }}{{ sep_token | default('none') }}",
    "{% if pad_token is defined %}{{ pad_token }}{% else %}no{% endif %}",
    "{{ messages | tojson }}",
    "{{ messages[1] | tojson(indent=2) }}",
    "{{ messages | map(attribute='role') | join(' ') }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{{ messages | rejectattr('role', 'in', ['user', 'system']) | map(attribute='content') "
    "| first }}",
    "{{ messages[2].content.split('</think>')[-1].lstrip('\\n') }}",
    "{{ messages[1].content | trim | upper }}",
    "{{ messages[1]['content'].strip().replace('\\n', ' ') | capitalize }}",
    "{% for m in messages %}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}"
    "{{ m.role }}{% endfor %}",
    "{% for m in messages[1:] %}{{ m['role'][0] }}{% endfor %}",
    "{% for m in messages[::-1] %}{{ m.role }}{% if loop.index == 2 %}{% break %}"
    "{% endif %}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}"
    "{{ m.role }}{% endfor %}",
    "{% set ns = namespace(n=0, last='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.last = m.role %}{% endfor %}{{ ns.n }}{{ ns.last }}",
    "{% macro turn(m, tail='') %}<{{ m.role }}>{{ m.content | trim }}{{ tail }}{% endmacro %}"
    "{{ turn(messages[0]) }}{{ turn(messages[1], tail='!') }}",
    "{% macro wrap() %}[{{ caller() }}]{% endmacro %}{% call wrap() %}in{% endcall %}",
    "{% for m in messages %}\n  {% if m.role == 'user' %}\n    {{- m.content }}\n  {%- endif %}\n"
    "{% endfor %}\n",
    "{%- set x -%}\n a {{ 1 }} \n{%- endset -%} [{{ x }}]",
    "{% filter upper %}abc{{ messages[3].content }}{% endfilter %}",
    "{% generation %}{{ messages[2].content }}{% endgeneration %}",
    "{{ raise_exception('roles must alternate') }}",
    "{{ messages[9].content }}",
    "{{ messages[0].nothing }}|{{ messages[0].nothing is defined }}",
    "{{ nothing.more }}",
    "{{ tools is none }}{{ documents is none }}{{ tools is defined }}",
    "{{ add_generation_prompt }}{{ enable_thinking is defined }}",
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}"
    "{% endif %}"
    "{{ 'head' if add_generation_prompt else 'none' }}",
    "{{ {'b': [1, none, true], 'a': 'é<'} | tojson }}",
    "{{ messages[0].items() | list }}{{ messages[0].keys() | list }}",
    "{{ messages[0] | dictsort }}{{ messages[0] | length }}",
    "{{ ['b', 'a'] | sort | join }}{{ [3, 1] | max }}{{ 7 // 2 }}{{ 2 ** 5 }}{{ 'a' ~ 1 }}",
    "{{ '%s and %d' % ('a', 3) }}{{ '{}-{}'.format(1, 'b') }}",
    "{{ messages[1].content | replace('\\n', '') | length }}{{ 'abc' | reverse }}"
    "{{ 'a b' | title }}",
    "{{ 'x' in 'xyz' }}{{ messages is iterable }}{{ messages is string }}{{ 1 is number }}"
    "{{ messages[0] is mapping }}{{ none is none }}{{ true is boolean }}",
    "{{ messages[0].content[:2] }}{{ messages[0]['content'][-1] }}{{ 'abc'.startswith('ab') }}",
    "{% with a = 1 %}{{ a }}{% endwith %}{{ a is defined }}",
    "{{ messages.append(1) }}",
    "{{ messages | groupby('role') | map('first') | join(',') }}{{ range(3) | list }}",
    "{{ messages[0].content | indent(2) }}{{ 'a\\nb' | indent(2, true) }}{{ ' a ' | trim }}",
)  # fmt: skip
VARIABLES = {
    "enable_thinking": False, "list": [1, {"a": "é"}], "pad_token": "<given>", "nothing": None,
    "tools": [{"type": "function", "function": {"name": "f"}}],
}  # fmt: skip
"""Variables of templates besides messages; they override the names of special tokens."""
VARIED = (
    TEMPLATE + "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}",
    "{{ list | tojson }}{{ list[1].a }}{{ nothing is none }}{{ nothing is defined }}",
    "{{ pad_token }}{{ eos_token }}{{ tools[0].function.name }}{{ other is defined }}",
)
CONTINUED = (
    TEMPLATE,
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "{% for m in messages %}{{ m.content.split('</think>')[-1].strip() }}\n{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
)
"""Templates that render a conversation whose last message the answer goes on with."""
BEGUN = ("so", "so  ", " so\n", "", "<think>x</think> so", "CONTINUE_FINAL_MESSAGE_TAG is a word")
FOLDERS_OF_FEATURES = ("llama, no names", "all names", "an older file first")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALLED = [
    {"role": "user", "content": "x", "name": None},
    {
        "role": "assistant", "content": None, "reasoning": "why",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": None}}}],
    },
    {"role": "tool", "content": "1", "tool_call_id": None},
    {"role": "assistant", "content": "y", "thinking": "so", "tool_calls": None},
]  # fmt: skip
"""A conversation as the clients of servers keep it: with null for what is not there."""
CALLING = (
    "{{ messages | tojson }}",
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.reasoning_content }}\n{% endfor %}",
)
_NAMED = [{"name": name, "template": f"{name} of the list"} for name in ("default", "tool_use")]
_CONFIG, _FILE = "tokenizer_config.json", "chat_template.jinja"
_MORE = "additional_chat_templates/tool_use.jinja"
TEMPLATES = {
    "one": {_CONFIG: json.dumps({"chat_template": "one{{ tools is none }}"})},
    "a list": {_CONFIG: json.dumps({"chat_template": _NAMED})},
    "a list without one for tools": {_CONFIG: json.dumps({"chat_template": _NAMED[:1]})},
    "a list and a file": {_CONFIG: json.dumps({"chat_template": _NAMED}), _FILE: "file"},
    "two files": {_CONFIG: json.dumps({"chat_template": _NAMED}), _FILE: "file", _MORE: "more"},
}
"""Files with chat templates, by what they show."""


def write_templates(folder: Path, files: Mapping[str, str]) -> None:
    """Writes one of `TEMPLATES`, with a tokenizer."""
    write(folder, {"tokenizer": byte_level_json(), "config": {"model_type": "llama"}})
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")


def begun(text: str) -> list[dict[str, str]]:
    """A conversation that ends with the beginning of an answer."""
    return [*MESSAGES, {"role": "assistant", "content": text}]


def said(theirs: Any, ids: list[int]) -> list[str]:
    """The texts that come back, without special tokens and with them."""
    return [theirs.decode(ids, skip_special_tokens=skip) for skip in (True, False)]


def rendering(theirs: Any, source: str, messages: Any = MESSAGES, **options: Any) -> str | None:
    """The text that transformers renders, or None where it raises an error."""
    if source:
        theirs.chat_template = source
    try:
        text: str = theirs.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:  # jinja2's, Python's: ours is another class
        print(f"{source}: {type(error).__name__}: {error}")
        return None
    return text


def main() -> None:
    import tokenizers
    import transformers
    from transformers import AutoTokenizer

    transformers.logging.set_verbosity_error()
    found: dict[str, Any] = {}
    for name, files in folders().items():
        with tempfile.TemporaryDirectory() as made:
            write(Path(made), files)
            theirs = AutoTokenizer.from_pretrained(made)
        theirs.chat_template = NAMES
        ids = [theirs.encode(text) for text in texts(name)]
        found[name] = {
            "special_tokens": theirs.special_tokens_map,
            "begin": theirs.bos_token_id,
            "names": theirs.apply_chat_template(MESSAGES, tokenize=False),
            "ids": ids[:SHOWN],
            "checks": [check(one, *said(theirs, one)) for one in ids],
        }
        if name in FOLDERS_OF_FEATURES:
            found[name]["rendered"] = rendered = []
            for source in FEATURES:
                text = rendering(theirs, source, add_generation_prompt=True)
                rendered.append(text)
    varied = [
        rendering(theirs, source, **VARIABLES, add_generation_prompt=True) for source in VARIED
    ]
    continued = [
        [rendering(theirs, source, begun(text), continue_final_message=True) for text in BEGUN]
        for source in CONTINUED
    ]
    called = [rendering(theirs, source, CALLED) for source in CALLING]
    templates = {}
    for name, texts_of in TEMPLATES.items():
        with tempfile.TemporaryDirectory() as made:
            write_templates(Path(made), texts_of)
            theirs = AutoTokenizer.from_pretrained(made)
        templates[name] = [rendering(theirs, "", tools=tools) for tools in (None, TOOLS)]
    versions = {one.__name__: one.__version__ for one in (transformers, tokenizers)}
    record = {
        "versions": versions, "folders": found, "varied": varied, "continued": continued,
        "called": called, "templates": templates,
    }  # fmt: skip
    RECORD.write_text(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
