"""Small chat templates of our own that exercise what model families do, and the tokenizers to go with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "user\nHello there, how are you?\nassistant\nI am fine.\n\nThank you\n",
    "system\nYou are terse. What is 2 + 2? The answer is 4. naïve 中文 text\n\n\n  indented",
    '{"name": "add", "arguments": {"a": 1}} think reasoning final analysis',
    "Assistant: yes\nHuman: no\nAssistant: yes\nHuman: no\nAssistant: yes\n" * 4,
]
WORDS_AND_LINES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Family:
    """A chat template with its tokens.

    Attributes:
        name: of the family.
        template: Jinja text.
        specials: special tokens.
        eos, bos: of the tokenizer.
        stripping: special tokens that take the white space after them.
        stripping_before: special tokens that take the white space before them.
        reads: `byte` (byte-level, line ends taken together), `words` (byte-level, the last white space before a word
            is the word's), `across` (byte-level, merges across words) or `metaspace`.
    """

    name: str
    template: str
    specials: tuple[str, ...]
    eos: str
    bos: str | None = None
    stripping: tuple[str, ...] = ()
    stripping_before: tuple[str, ...] = ()
    reads: str = "byte"


def build(family: Family, folder: Path) -> PreTrainedTokenizerFast:
    """The family's tokenizer, trained and saved."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>" if family.reads == "metaspace" else None))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if family.reads == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.Split(Regex("\n"), "isolated")]
        )
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = sorted({letter for text in CORPUS for letter in text} | set(map(chr, range(32, 127))) | {"▁", "\n"})
    elif family.reads == "byte":
        words = pre_tokenizers.Split(Regex(WORDS_AND_LINES), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=family.reads == "words")
        tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=520, special_tokens=["<unk>", "<pad>"], initial_alphabet=list(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(
        [
            AddedToken(text, lstrip=text in family.stripping_before, rstrip=text in family.stripping, normalized=False)
            for text in family.specials
        ]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=family.eos,
        bos_token=family.bos,
        pad_token="<pad>",
        chat_template=family.template,
        clean_up_tokenization_spaces=False,
    )
    wrapped.save_pretrained(folder)
    return wrapped


CHATML = Family(
    "chatml",
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}",
    ("<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
)

TAGGED = Family(
    "generation tags",
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}"
    "{{ '<|im_start|>assistant\\n' }}{% generation %}{{ m.content + '<|im_end|>\\n' }}{% endgeneration %}"
    "{%- else -%}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}",
    ("<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
)

HEADER_TAGGED = Family(
    "generation tags around the header too",
    CHATML.template.replace(
        "{{ '<|im_start|>' + m.role",
        "{%- if m.role == 'assistant' -%}{% generation %}"
        "{{ '<|im_start|>assistant\\n' + m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
        "{%- else -%}{{ '<|im_start|>' + m.role",
    ).replace("<|im_end|>\\n' }}{%- endfor", "<|im_end|>\\n' }}{%- endif -%}{%- endfor"),
    ("<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
)

LYING_TAGS = Family(
    "generation tags that miss a part of the answer",
    TAGGED.template.replace("{% generation %}{{ m.content +", "{{ m.content[:2] }}{% generation %}{{ m.content[2:] +"),
    ("<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
)

HEADERS = Family(
    "headers and bos, trimmed",
    "{{ bos_token }}{%- for m in messages -%}"
    "{{ '<|head|>' + m.role + '<|/head|>\\n\\n' + m.content | trim + '<|eot|>' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|head|>assistant<|/head|>\\n\\n' }}{%- endif -%}",
    ("<|bos|>", "<|head|>", "<|/head|>", "<|eot|>"),
    "<|eot|>",
    bos="<|bos|>",
)

INSTRUCT = Family(
    "instruct, system folded, bos each turn",
    "{%- set ns = namespace(system='') -%}{%- for m in messages -%}"
    "{%- if m.role == 'system' -%}{%- set ns.system = '<<SYS>>' + m.content + '<</SYS>> ' -%}"
    "{%- elif m.role == 'user' -%}"
    "{{ bos_token + '[INST] ' + ns.system + m.content | trim + ' [/INST]' }}{%- set ns.system = '' -%}"
    "{%- else -%}{{ ' ' + m.content | trim + ' ' + eos_token }}{%- endif -%}{%- endfor -%}",
    ("<s>", "</s>"),
    "</s>",
    bos="<s>",
)

TURNS = Family(
    "other role names, strict alternation",
    "{{ bos_token }}{%- if messages[0].role == 'system' -%}{{ raise_exception('no system role') }}{%- endif -%}"
    "{%- for m in messages -%}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}"
    "{{ '<turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim + '</turn>\\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<turn>model\\n' }}{%- endif -%}",
    ("<bos>", "<turn>", "</turn>"),
    "</turn>",
    bos="<bos>",
)

_THOUGHT = (
    "{%- set ns = namespace(last=0) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{ '<|im_start|>assistant\\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or m.reasoning_content) -%}"
    "{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{%- endif -%}"
    "{{ m.content }}"
    "{%- for call in m.tool_calls or [] -%}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{%- endfor -%}"
    "{{ '<|im_end|>\\n' }}"
    "{%- else -%}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}SWITCH{%- endif -%}"
)
_SWITCH = (
    "{%- if enable_thinking is defined and not enable_thinking -%}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}"
)

THINKING = Family(
    "thinking stripped from history, with a switch",
    _THOUGHT.replace("SWITCH", _SWITCH),
    ("<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
)

THINKING_WORDS = Family(
    "the same, the prompt's last line ends are one token when read alone",
    THINKING.template,
    THINKING.specials,
    THINKING.eos,
    reads="words",
)

NO_SWITCH = Family(
    "empty think tags without a switch",
    _THOUGHT.replace("SWITCH", ""),
    ("<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
)

ALWAYS_THINKS = Family(
    "generation prompt opens a thought that history drops",
    "{{ bos_token }}{%- for m in messages -%}"
    "{%- if m.role == 'assistant' -%}{{ '<|asks|>' + m.content.split('</think>')[-1] | trim + eos_token }}"
    "{%- else -%}{{ '<|says|>' + m.content }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|asks|><think>\\n' }}{%- endif -%}",
    ("<|begin|>", "<|stop|>", "<|asks|>", "<|says|>"),
    "<|stop|>",
    bos="<|begin|>",
)

TOOLS = Family(
    "tools in a system turn, calls as json",
    "{%- if tools -%}{{ '<|im_start|>system\\nTools: ' + tools | tojson + '<|im_end|>\\n' }}{%- endif -%}"
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{%- for call in m.tool_calls or [] -%}{{ '<call>' + call.function | tojson + '</call>' }}{%- endfor -%}"
    "{{ '<|im_end|>\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}",
    ("<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
)

TOOLS_MOVE = Family(
    "tools stand before the last question only",
    "{{ bos_token }}{%- set users = messages | selectattr('role', 'equalto', 'user') | list -%}"
    "{%- set ns = namespace(asked=0) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.asked = ns.asked + 1 -%}"
    "{%- if tools and ns.asked == users | length -%}{{ '[TOOLS]' + tools | tojson + '[/TOOLS]' }}{%- endif -%}"
    "{{ '[INST]' + m.content + '[/INST]' }}"
    "{%- elif m.role == 'assistant' -%}{{ m.content + eos_token }}{%- else -%}{{ '[RESULT]' + m.content }}{%- endif -%}"
    "{%- endfor -%}",
    ("<s>", "</s>", "[INST]", "[/INST]", "[TOOLS]", "[/TOOLS]", "[RESULT]"),
    "</s>",
    bos="<s>",
)

STRIPPING = Family(
    "special tokens that take the white space after them",
    "{%- for m in messages -%}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}",
    ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "<|end|>",
    stripping=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
)

DATED = Family(
    "today's date in the prompt",
    "{{ '<|im_start|>system\\n' + strftime_now('%Y-%m-%d') + '<|im_end|>\\n' }}" + CHATML.template,
    CHATML.specials,
    CHATML.eos,
)

STRIPPING_BEFORE = Family(
    "an end token that takes the white space before it",
    CHATML.template,
    CHATML.specials,
    CHATML.eos,
    stripping_before=("<|im_end|>",),
)

CHANNELS = Family(
    "channels, another end in history",
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}"
    "{%- if loop.last and m.reasoning_content -%}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' }}{%- endif -%}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}"
    "{%- else -%}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}",
    ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"),
    "<|return|>",
)

WORDS = Family(
    "plain words, tokens merge across the border",
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{ 'Assistant:' + m.content + eos_token + '\\n' }}"
    "{%- else -%}{{ 'Human: ' + m.content + '\\n' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'Assistant:' }}{%- endif -%}",
    ("</s>",),
    "</s>",
    reads="across",
)

OTHER_END = Family(
    "turns close with a token that is no end token",
    CHATML.template,
    ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    "<|endoftext|>",
)

NO_END = Family(
    "turns close with nothing",
    "{%- for m in messages -%}{{ m.role + ': ' + m.content + '\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}",
    ("<|endoftext|>",),
    "<|endoftext|>",
)

METASPACE = Family(
    "metaspace words, eos closes every turn",
    "{%- for m in messages -%}{{ '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}",
    ("<s>", "</s>"),
    "</s>",
    bos="<s>",
    reads="metaspace",
)
