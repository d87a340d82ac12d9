"""Small chat templates of our own, each with what one family of targets does that others do not.

The names are those of the families whose templates do so; the templates are not theirs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from template_families import Family, build


@dataclass(frozen=True)
class Construct:
    """A template, how it is served, and which kinds of chats cannot be prepared with it.

    Attributes:
        family: template and special tokens.
        ends: tokens at which servers stop, beside the tokenizer's own.
        on, off: variables that turn thinking on and off; None where there is no such switch.
        left_out: reason → kinds of `template_chats.CHATS`.
    """

    family: Family
    ends: tuple[str, ...] = ()
    on: Mapping[str, Any] | None = None
    off: Mapping[str, Any] | None = None
    left_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """The tokenizer, with a generation_config.json that names the ends."""
        tokenizer = build(self.family, folder)
        ids = [tokenizer.convert_tokens_to_ids(token) for token in self.ends]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}), encoding="utf-8")


def made(template: str, *specials: str, eos: str, bos: str | None = None, **more: Any) -> Construct:
    """A construct; the lines of the template are joined without the white space around them."""
    text = "".join(line.strip() for line in template.splitlines())
    specials = tuple(dict.fromkeys((*specials, eos, *more.get("ends", ()))))
    return Construct(Family("", text, specials, eos, bos), **more)


APART = (
    *("thought", "thought, system", "thought as `reasoning`", "thought in reasoning_details"),
    *("thoughts, several turns", "thought in the last turn only", "thought in the first turn only"),
    *("thought beside a call", "thought and text beside a call"),
)
"""Kinds of chats with a thought outside the content."""
INSIDE = ("thought inside the content", "thoughts inside, several turns")
NO_THOUGHT = (
    *("plain", "system", "several turns", "system, several turns", "ShareGPT with system", "question at the end"),
    *("two answers in a row", "greeting first", "a turn without loss", "call at the end", "call, result, answer"),
    *("old function_call", "two calls", "three calls", "text beside a call", "calls in a row"),
    *("call, then another question", "system, tools"),
)
SOME_THOUGHT = ("thought in the last turn only", "thought in the first turn only", "thought and text beside a call")
"""Kinds in which some turns have a thought and others have none."""
RESULTS = (
    *("call, result, answer", "old function_call", "two calls", "three calls", "text beside a call", "calls in a row"),
    *("call, then another question", "thought beside a call", "thought and text beside a call", "system, tools"),
)
SYSTEM = ("system", "system, several turns", "ShareGPT with system", "thought, system", "system, tools")


def less(kinds: tuple[str, ...], *others: str) -> tuple[str, ...]:
    return tuple(kind for kind in kinds if kind not in others)


IM = ("<|im_start|>", "<|im_end|>")
THINK = {"on": {"enable_thinking": True}, "off": {"enable_thinking": False}}
CALLS = "{% for c in m.tool_calls or [] %}{{ '<tool_call>\\n' + c.function | tojson + '\\n</tool_call>' }}{% endfor %}"
TOOLS = "{% if tools %}{{ '<|im_start|>system\\n# Tools\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}"
OTHERS = "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
LAST_USER = """{% set ns = namespace(last=-1) %}
{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"""
SPLIT = """{% set text = m.content %}{% set thought = m.reasoning_content or '' %}
{% if '</think>' in text %}
{% set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}"""

CONSTRUCTS: dict[str, Construct] = {
    "Llama 3: one call a turn, text beside it dropped, a date": made(
        """{{ bos_token }}{{ '<|head|>system<|/head|>\\n\\nToday: ' + strftime_now('%d %b %Y') }}
        {% if messages[0].role == 'system' %}{{ '\\n' + messages[0].content | trim }}{% set messages = messages[1:] %}
        {% endif %}{{ '<|eot|>' }}
        {% for m in messages %}
        {% if m.tool_calls %}
        {% if m.tool_calls | length > 1 %}{{ raise_exception('only single tool-calls') }}{% endif %}
        {% set f = m.tool_calls[0].function %}
        {{ '<|head|>assistant<|/head|>\\n\\n{"name": "' + f.name + '", "parameters": ' + f.arguments | tojson }}
        {{ '}<|eot|>' }}
        {% elif m.role == 'tool' %}{{ '<|head|>ipython<|/head|>\\n\\n' + m.content | tojson + '<|eot|>' }}
        {% else %}
        {% if tools and loop.first %}{{ '<|head|>user<|/head|>\\n\\n' + tools | tojson + m.content | trim + '<|eot|>' }}
        {% else %}{{ '<|head|>' + m.role + '<|/head|>\\n\\n' + m.content | trim + '<|eot|>' }}{% endif %}
        {% endif %}{% endfor %}
        {% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}""",
        *("<|bos|>", "<|head|>", "<|/head|>"),
        eos="<|eot|>",
        bos="<|bos|>",
        left_out={"not_written": (*APART, "text beside a call"), "template_refuses": ("two calls", "three calls")},
    ),
    "Qwen2.5, Hermes: system by default, results in a user turn": made(
        """{{ '<|im_start|>system\\n' }}
        {% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}{{ 'You are helpful.' }}{% endif %}
        {% if tools %}{{ '\\n\\n# Tools\\n' + tools | tojson }}{% endif %}{{ '<|im_end|>\\n' }}
        {% for m in messages %}
        {% if m.role == 'tool' %}
        {% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
        {% elif m.role == 'assistant' %}
        {{ '<|im_start|>assistant' }}{% if m.content %}{{ '\\n' + m.content }}{% endif %}
        {% for c in m.tool_calls or [] %}{{ '\\n<tool_call>\\n' + c.function | tojson + '\\n</tool_call>' }}{% endfor %}
        {{ '<|im_end|>\\n' }}
        {% elif not (loop.first and m.role == 'system') %}
        {{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
        {% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
        *IM,
        eos="<|im_end|>",
        left_out={"not_written": APART},
    ),
    "Qwen3: thoughts leave the history, off closes one in the prompt": made(
        TOOLS
        + LAST_USER
        + "{% for m in messages %}{% if m.role == 'assistant' %}"
        + SPLIT
        + """{{ '<|im_start|>assistant\\n' }}
        {% if loop.index0 > ns.last and (loop.last or thought) %}
        {{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}{{ text }}"""
        + CALLS
        + "{{ '<|im_end|>\\n' }}"
        + OTHERS
        + """{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
        {% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
        {% endif %}""",
        *IM,
        eos="<|im_end|>",
        **THINK,
    ),
    "Qwen3 Thinking: the prompt opens a thought, turns hold it": made(
        TOOLS
        + LAST_USER
        + "{% for m in messages %}{% if m.role == 'assistant' %}"
        + SPLIT
        + """{{ '<|im_start|>assistant\\n' }}
        {% if loop.index0 > ns.last %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}{{ text }}"""
        + CALLS
        + "{{ '<|im_end|>\\n' }}"
        + OTHERS
        + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}",
        *IM,
        eos="<|im_end|>",
        left_out={"no_reasoning": NO_THOUGHT},
    ),
    "Qwen3.5: on opens a thought, off closes it, calls in tags": made(
        TOOLS
        + LAST_USER
        + "{% for m in messages %}{% if m.role == 'assistant' %}"
        + SPLIT
        + """{{ '<|im_start|>assistant\\n' }}
        {% if loop.index0 > ns.last %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}{{ text }}
        {% for c in m.tool_calls or [] %}{{ '\\n\\n<tool_call>\\n<function=' + c.function.name + '>\\n' }}
        {% for name, value in c.function.arguments.items() %}
        {{ '<parameter=' + name + '>\\n' + value | string + '\\n</parameter>\\n' }}{% endfor %}
        {{ '</function>\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}"""
        + OTHERS
        + """{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
        {% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}
        {% else %}{{ '<think>\\n' }}{% endif %}{% endif %}""",
        *IM,
        eos="<|im_end|>",
        **THINK,
    ),
    "QwQ: off closes a thought that turns never hold": made(
        TOOLS
        + "{% for m in messages %}{% if m.role == 'assistant' %}"
        + """{{ '<|im_start|>assistant\\n' + m.content.split('</think>')[-1].lstrip('\\n') }}"""
        + CALLS
        + "{{ '<|im_end|>\\n' }}"
        + OTHERS
        + """{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
        {% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}
        {% else %}{{ '<think>\\n' }}{% endif %}{% endif %}""",
        *IM,
        eos="<|im_end|>",
        **THINK,
        left_out={"no_reasoning": SOME_THOUGHT},
    ),
    "Gemma 2: no system, strict alternation, trimmed": made(
        """{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}
        {% for m in messages %}
        {% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
        {{ '<turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim + '</turn>\\n' }}
        {% endfor %}{% if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}""",
        *("<bos>", "<turn>", "<eos>"),
        eos="<eos>",
        bos="<bos>",
        ends=("</turn>",),
        left_out={
            "template_refuses": (*SYSTEM, "two answers in a row", "greeting first", *less(RESULTS, "system, tools")),
            "not_written": (*less(APART, "thought, system", *RESULTS), "call at the end"),
        },
    ),
    "Gemma 3: system folded into the first question": made(
        """{{ bos_token }}{% set first = '' %}
        {% if messages[0].role == 'system' %}{% set first = messages[0].content + '\\n\\n' %}
        {% set messages = messages[1:] %}{% endif %}
        {% for m in messages %}
        {% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
        {{ '<turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (first if loop.first else '') }}
        {{ m.content | trim + '</turn>\\n' }}{% endfor %}
        {% if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}""",
        *("<bos>", "<turn>", "<eos>"),
        eos="<eos>",
        bos="<bos>",
        ends=("</turn>",),
        left_out={
            "template_refuses": ("two answers in a row", "greeting first", *RESULTS),
            "not_written": (*less(APART, *RESULTS), "call at the end"),
        },
    ),
    "Gemma 4: the switch is in the system text, thoughts only beside calls, results in the model's turn": made(
        """{{ bos_token }}
        {% if enable_thinking or tools or messages[0].role == 'system' %}{{ '<|turn>system\\n' }}
        {% if enable_thinking %}{{ '<|think|>\\n' }}{% endif %}
        {% if messages[0].role == 'system' %}
        {{ messages[0].content | trim }}{% set messages = messages[1:] %}{% endif %}
        {% if tools %}{{ tools | tojson }}{% endif %}{{ '<turn|>\\n' }}{% endif %}"""
        + LAST_USER
        + """{% set at = namespace(model=false, calls=false) %}
        {% for m in messages %}
        {% if m.role == 'tool' %}{{ '<|tool_response>' + m.content + '<tool_response|>' }}{% set at.calls = false %}
        {% else %}
        {% if m.role != 'assistant' or not at.model %}
        {{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}{% endif %}
        {% set at.model = false %}
        {% if m.tool_calls and m.reasoning_content and loop.index0 > ns.last %}
        {{ '<|channel>thought\\n' + m.reasoning_content + '\\n<channel|>' }}{% endif %}
        {{ m.content | trim }}
        {% for c in m.tool_calls or [] %}
        {{ '<|tool_call>call:' + c.function.name + c.function.arguments | tojson + '<tool_call|>' }}{% endfor %}
        {% if m.tool_calls %}{% set at.model = true %}
        {% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|tool_response>' }}{% endif %}
        {% else %}{{ '<turn|>\\n' }}{% endif %}
        {% endif %}{% endfor %}
        {% if add_generation_prompt and not at.model %}{{ '<|turn>model\\n' }}
        {% if not enable_thinking %}{{ '<|channel>thought\\n<channel|>' }}{% endif %}{% endif %}""",
        *(
            "<bos>",
            "<|turn>",
            "<turn|>",
            "<|channel>",
            "<channel|>",
            "<|tool_call>",
            "<tool_call|>",
            "<|tool_response>",
        ),
        *("<tool_response|>", "<|think|>", "<eos>"),
        eos="<eos>",
        bos="<bos>",
        ends=("<turn|>", "<|tool_response>"),
        **THINK,
    ),
    "Mistral v0.3: system and tools before the last question, no generation prompt, ids of nine letters": made(
        """{{ bos_token }}{% set ns = namespace(system='') %}
        {% if messages[0].role == 'system' %}{% set ns.system = messages[0].content + '\\n\\n' %}
        {% set messages = messages[1:] %}{% endif %}
        {% set users = messages | selectattr('role', 'equalto', 'user') | list %}
        {% for m in messages %}
        {% if m.role == 'user' %}
        {% if tools and m == users[-1] %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
        {{ '[INST]' + (ns.system if loop.last else '') + m.content + '[/INST]' }}
        {% elif m.tool_calls %}{{ '[TOOL_CALLS][' }}
        {% for c in m.tool_calls %}
        {% if c.id is not defined or c.id | length != 9 %}{{ raise_exception('ids of nine letters') }}{% endif %}
        {{ (c.function | tojson)[:-1] + ', "id": "' + c.id + '"}' + (', ' if not loop.last else '') }}{% endfor %}
        {{ ']' + eos_token }}
        {% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}
        {% else %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}{% endif %}{% endfor %}""",
        *("<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
        "[/TOOL_RESULTS]",
        eos="</s>",
        bos="<s>",
        left_out={"not_written": (*APART, "text beside a call"), "template_refuses": ("old function_call",)},
    ),
    "Ministral reasoning: a thought is a part of the content": made(
        """{{ bos_token }}
        {% for m in messages %}
        {% if m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}
        {% elif m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
        {% elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
        {% else %}
        {% if m.content is string %}{{ m.content }}{% else %}
        {% for part in m.content %}
        {% if part.type == 'thinking' %}{{ '[THINK]' + part.thinking + '[/THINK]' }}{% else %}{{ part.text }}{% endif %}
        {% endfor %}{% endif %}
        {% for c in m.tool_calls or [] %}
        {{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' + c.function.arguments | tojson }}{% endfor %}
        {{ eos_token }}{% endif %}{% endfor %}""",
        *("<s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[THINK]", "[/THINK]", "[TOOL_CALLS]"),
        *("[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        eos="</s>",
        bos="<s>",
    ),
    "Mistral with effort: the switch takes words": made(
        """{{ bos_token }}{% set effort = reasoning_effort | default('none') %}
        {% if effort not in ['none', 'high'] %}{{ raise_exception('none or high') }}{% endif %}
        {{ '[MODEL_SETTINGS]{"reasoning_effort": "' + effort + '"}[/MODEL_SETTINGS]' }}
        {% for m in messages %}
        {% if m.role == 'assistant' %}
        {% if m.reasoning %}{{ '[THINK]' + m.reasoning + '[/THINK]' }}{% endif %}{{ m.content }}
        {% for c in m.tool_calls or [] %}{{ '[TOOL_CALLS]' + c.function | tojson }}{% endfor %}{{ eos_token }}
        {% else %}{{ '[INST]' + m.role + ': ' + m.content + '[/INST]' }}{% endif %}{% endfor %}""",
        *("<s>", "[INST]", "[/INST]", "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[MODEL_SETTINGS]", "[/MODEL_SETTINGS]"),
        eos="</s>",
        bos="<s>",
        on={"reasoning_effort": "high"},
        off={"reasoning_effort": "none"},
    ),
    "DeepSeek V3.1: think or /think in the prompt, /think in every turn, arguments as text": made(
        """{% if thinking is not defined %}{% set thinking = false %}{% endif %}{{ bos_token }}
        {% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}
        {% set ns = namespace(asked=false) %}
        {% for m in messages %}
        {% if m.role == 'user' %}{{ '<|User|>' + m.content }}{% set ns.asked = true %}
        {% elif m.role == 'tool' %}{{ '<|output|>' + m.content + '<|/output|>' }}
        {% elif m.role == 'assistant' %}
        {% if ns.asked %}{{ '<|Assistant|></think>' }}{% endif %}{% set ns.asked = false %}
        {{ m.content.split('</think>')[-1] }}
        {% for c in m.tool_calls or [] %}
        {{ '<|call|>' + c.function.name + '<|sep|>' + c.function.arguments }}{% endfor %}
        {{ eos_token }}{% endif %}{% endfor %}
        {% if add_generation_prompt and ns.asked %}
        {{ '<|Assistant|>' + ('<think>' if thinking else '</think>') }}{% endif %}""",
        *("<|bos|>", "<|User|>", "<|Assistant|>", "<|output|>", "<|/output|>", "<|call|>", "<|sep|>"),
        eos="<|eos|>",
        bos="<|bos|>",
        on={"thinking": True},
        off={"thinking": False},
        left_out={"no_reasoning": SOME_THOUGHT[:2], "not_written": ("thought beside a call",)},
    ),
    "DeepSeek R1: the prompt opens a thought that turns drop": made(
        """{{ bos_token }}
        {% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}
        {% for m in messages %}
        {% if m.role == 'user' %}{{ '<|User|>' + m.content }}
        {% elif m.role == 'tool' %}{{ '<|output|>' + m.content + '<|/output|>' }}
        {% elif m.role == 'assistant' %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] }}
        {% for c in m.tool_calls or [] %}{{ '<|call|>' + c.function | tojson }}{% endfor %}
        {{ eos_token }}{% endif %}{% endfor %}
        {% if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}""",
        *("<|bos|>", "<|User|>", "<|Assistant|>", "<|output|>", "<|/output|>", "<|call|>"),
        eos="<|eos|>",
        bos="<|bos|>",
        left_out={"no_reasoning": (*NO_THOUGHT, *SOME_THOUGHT)},
    ),
    "gpt-oss: channels, analysis dropped after a final answer, the first call alone": made(
        """{{ '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
        {% if tools %}{{ '<|start|>developer<|message|>' + tools | tojson + '<|end|>' }}{% endif %}
        {% set ns = namespace(call='') %}
        {% for m in messages %}
        {% if m.role == 'assistant' %}
        {% if '<|channel|>' in m.content %}{{ raise_exception('channels in the content') }}{% endif %}
        {% if 'tool_calls' in m %}
        {% set later = namespace(final=false) %}
        {% for o in messages[loop.index:] %}
        {% if o.role == 'assistant' and 'tool_calls' not in o %}{% set later.final = true %}{% endif %}{% endfor %}
        {% if m.content and m.thinking %}{{ raise_exception('content and thinking beside a call') }}
        {% elif (m.content or m.thinking) and not later.final %}
        {{ '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}{% endif %}
        {% set ns.call = m.tool_calls[0].function %}
        {{ '<|start|>assistant to=functions.' + ns.call.name + '<|channel|>commentary json<|message|>' }}
        {{ ns.call.arguments | tojson + '<|call|>' }}
        {% elif loop.last and not add_generation_prompt %}
        {% if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
        {{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
        {% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}
        {% elif m.role == 'tool' %}
        {{ '<|start|>functions.' + ns.call.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{ m.content | tojson + '<|end|>' }}
        {% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}
        {% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}""",
        *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"),
        eos="<|return|>",
        ends=("<|return|>", "<|call|>"),
        left_out={"not_written": ("two calls", "three calls"), "template_refuses": SOME_THOUGHT[2:]},
    ),
    "GLM 4.5: turns end with the next role's marker, off changes the question": made(
        "[gMASK]<sop>{% if tools %}{{ '<|system|>\\n' + tools | tojson }}{% endif %}"
        + LAST_USER
        + """{% for m in messages %}
        {% if m.role == 'user' %}{{ '<|user|>\\n' + m.content }}
        {% if enable_thinking is defined and not enable_thinking %}{{ '/nothink' }}{% endif %}
        {% elif m.role == 'tool' %}
        {% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}
        {{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {% elif m.role == 'system' %}{{ '<|system|>\\n' + m.content }}
        {% else %}"""
        + SPLIT
        + """{{ '<|assistant|>' }}
        {% if loop.index0 > ns.last and thought %}{{ '\\n<think>' + thought | trim + '</think>' }}
        {% else %}{{ '\\n<think></think>' }}{% endif %}
        {% if text | trim %}{{ '\\n' + text | trim }}{% endif %}
        {% for c in m.tool_calls or [] %}{{ '\\n<tool_call>' + c.function.name }}
        {% for name, value in c.function.arguments.items() %}
        {{ '\\n<arg_key>' + name + '</arg_key>\\n<arg_value>' + value | string + '</arg_value>' }}{% endfor %}
        {{ '\\n</tool_call>' }}{% endfor %}
        {% endif %}{% endfor %}
        {% if add_generation_prompt %}{{ '<|assistant|>' }}
        {% if enable_thinking is defined and not enable_thinking %}{{ '\\n<think></think>' }}{% endif %}{% endif %}""",
        *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        eos="<|endoftext|>",
        ends=("<|endoftext|>", "<|user|>", "<|observation|>"),
        **THINK,
    ),
    "GLM 4.7 and 5: the same, on opens a thought": made(
        "[gMASK]<sop>{% if tools %}{{ '<|system|>' + tools | tojson }}{% endif %}"
        + LAST_USER
        + """{% for m in messages %}
        {% if m.role == 'tool' %}
        {% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}
        {{ '<tool_response>' + m.content + '</tool_response>' }}
        {% elif m.role != 'assistant' %}{{ '<|' + m.role + '|>' + m.content }}
        {% else %}"""
        + SPLIT
        + """{{ '<|assistant|>' }}
        {% if loop.index0 > ns.last and thought %}{{ '<think>' + thought | trim + '</think>' }}
        {% else %}{{ '</think>' }}{% endif %}{{ text | trim }}
        {% for c in m.tool_calls or [] %}
        {{ '<tool_call>' + c.function.name + c.function.arguments | tojson + '</tool_call>' }}{% endfor %}
        {% endif %}{% endfor %}
        {% if add_generation_prompt %}{{ '<|assistant|>' }}
        {{ '</think>' if enable_thinking is defined and not enable_thinking else '<think>' }}{% endif %}""",
        *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        eos="<|endoftext|>",
        ends=("<|endoftext|>", "<|user|>", "<|observation|>"),
        **THINK,
        left_out={"no_reasoning": SOME_THOUGHT},
    ),
    "Kimi K2: ids of calls in the results, no thoughts": made(
        """{% if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}{% endif %}
        {% for m in messages %}
        {{ '<|im_' + (m.role if m.role in ('user', 'assistant') else 'system') + '|>' + m.role + '<|im_middle|>' }}
        {% if m.role == 'tool' %}{{ '## Return of ' + (m.tool_call_id or '') + '\\n' }}{% endif %}{{ m.content }}
        {% for c in m.tool_calls or [] %}
        {{ '<|call_begin|>' + (c.id or '') + '<|call_argument|>' + c.function | tojson + '<|call_end|>' }}{% endfor %}
        {{ '<|im_end|>' }}{% endfor %}
        {% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}""",
        *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|call_begin|>", "<|call_argument|>"),
        *("<|call_end|>", "[EOS]"),
        eos="[EOS]",
        ends=("<|im_end|>",),
        left_out={"not_written": APART},
    ),
    "Kimi K2 Thinking: thoughts only beside calls, empty ones in all other turns": made(
        """{% set ns = namespace(last=-1) %}
        {% for m in messages %}
        {% if m.role == 'assistant' and not m.tool_calls %}{% set ns.last = loop.index0 %}{% endif %}
        {% endfor %}
        {% if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}{% endif %}
        {% for m in messages %}
        {{ '<|im_' + (m.role if m.role in ('user', 'assistant') else 'system') + '|>' + m.role + '<|im_middle|>' }}
        {% if m.role == 'assistant' %}
        {{ '<think>' + ((m.reasoning_content or '') if loop.index0 > ns.last else '') + '</think>' }}{% endif %}
        {{ m.content }}
        {% for c in m.tool_calls or [] %}{{ '<|call_begin|>' + c.function | tojson + '<|call_end|>' }}{% endfor %}
        {{ '<|im_end|>' }}{% endfor %}
        {% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}""",
        *(
            "<|im_user|>",
            "<|im_assistant|>",
            "<|im_system|>",
            "<|im_middle|>",
            "<|call_begin|>",
            "<|call_end|>",
            "[EOS]",
        ),
        eos="[EOS]",
        ends=("<|im_end|>",),
    ),
    "SmolLM3: the switch changes the system text, thoughts are never read": made(
        """{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}
        {{ '<|im_start|>system\\nReasoning Mode: ' + ('/think' if enable_thinking else '/no_think') + '\\n' }}
        {% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
        {% if tools %}{{ tools | tojson }}{% endif %}{{ '<|im_end|>\\n' }}
        {% for m in messages %}
        {% if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
        {% if not enable_thinking %}{{ '<think>\\n\\n</think>\\n' }}{% endif %}
        {{ m.content.lstrip('\\n') }}"""
        + CALLS
        + """{{ '<|im_end|>\\n' }}
        {% elif m.role == 'tool' %}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
        {% elif m.role == 'user' %}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
        {% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
        {% if not enable_thinking %}{{ '<think>\\n\\n</think>\\n' }}{% endif %}{% endif %}""",
        *IM,
        eos="<|im_end|>",
        **THINK,
        left_out={"not_written": APART},
    ),
    "Granite: the switch changes the system text alone, calls are not written": made(
        """{{ '<|role|>system<|/role|>' }}
        {% if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}
        {% elif thinking %}{{ 'Write your thoughts between <think></think>.' }}{% else %}{{ 'Be helpful.' }}{% endif %}
        {% if tools %}{{ tools | tojson }}{% endif %}{{ '<|end_of_text|>\\n' }}
        {% for m in messages %}{{ '<|role|>' + m.role + '<|/role|>' + m.content + '<|end_of_text|>\\n' }}{% endfor %}
        {% if add_generation_prompt %}{{ '<|role|>assistant<|/role|>' }}{% endif %}""",
        *("<|role|>", "<|/role|>"),
        eos="<|end_of_text|>",
        on={"thinking": True},
        off={"thinking": False},
        left_out={"not_written": (*APART, "call at the end", *less(RESULTS, *APART))},
    ),
    "Phi: headers without line ends, calls after the text": made(
        """{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}
        {% if m.role == 'system' and tools %}{{ '<|tool|>' + tools | tojson + '<|/tool|>' }}{% endif %}
        {% for c in m.tool_calls or [] %}{{ '<|tool_call|>' + c.function | tojson + '<|/tool_call|>' }}{% endfor %}
        {{ '<|end|>' }}{% endfor %}
        {% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}""",
        *("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>"),
        eos="<|endoftext|>",
        ends=("<|endoftext|>", "<|end|>"),
        left_out={"not_written": APART},
    ),
    "Command R7B: thoughts only beside calls, text beside calls dropped, a plan": made(
        """{{ bos_token + '<|TURN|><|SYSTEM|>' }}{% if tools %}{{ tools | tojson }}{% endif %}{{ '<|END_TURN|>' }}
        {% for m in messages %}{{ '<|TURN|>' }}
        {% if m.role == 'assistant' %}{{ '<|CHATBOT|>' }}
        {% if m.tool_calls %}
        {{ '<|START_THINKING|>' + (m.reasoning_content or '') + '<|END_THINKING|><|START_ACTION|>[' }}
        {% for c in m.tool_calls %}{{ c.function | tojson + (', ' if not loop.last else '') }}{% endfor %}
        {{ ']<|END_ACTION|>' }}
        {% else %}{{ '<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' }}{% endif %}
        {% else %}{{ ('<|USER|>' if m.role == 'user' else '<|SYSTEM|>') + m.content }}{% endif %}
        {{ '<|END_TURN|>' }}{% endfor %}
        {% if add_generation_prompt %}{{ '<|TURN|><|CHATBOT|>' }}
        {% if not enable_thinking %}{{ '<|START_THINKING|><|END_THINKING|>' }}{% endif %}{% endif %}""",
        *("<|bos|>", "<|TURN|>", "<|SYSTEM|>", "<|USER|>", "<|CHATBOT|>", "<|START_THINKING|>", "<|END_THINKING|>"),
        *("<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        eos="<|END_TURN|>",
        bos="<|bos|>",
        **THINK,
        left_out={"not_written": ("text beside a call", "thought and text beside a call")},
    ),
    "Command with skip_thinking: a switch the other way round": made(
        TOOLS
        + """{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
        {% if m.reasoning and not skip_thinking %}
        {{ '<|START_THINKING|>' + m.reasoning + '<|END_THINKING|>' }}{% endif %}
        {{ m.content }}"""
        + CALLS
        + "{{ '<|im_end|>\\n' }}"
        + OTHERS
        + """{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
        {% if skip_thinking %}{{ '<|START_THINKING|><|END_THINKING|>' }}{% endif %}{% endif %}""",
        *IM,
        *("<|START_THINKING|>", "<|END_THINKING|>"),
        eos="<|im_end|>",
        on={"skip_thinking": False},
        off={"skip_thinking": True},
    ),
    "EXAONE Deep: the prompt opens <thought>, turns drop it": made(
        """{% for m in messages %}
        {% if m.role == 'assistant' %}{{ '[|assistant|]' + m.content.split('</thought>')[-1] }}
        {% for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function | tojson + '</tool_call>' }}{% endfor %}
        {{ '[|endofturn|]\\n' }}
        {% else %}{{ '[|' + m.role + '|]' + m.content + '[|endofturn|]\\n' }}{% endif %}{% endfor %}
        {% if add_generation_prompt %}{{ '[|assistant|]<thought>\\n' }}{% endif %}""",
        *("[|assistant|]", "[|user|]", "[|system|]", "[|tool|]"),
        eos="[|endofturn|]",
        left_out={
            "no_reasoning": (*NO_THOUGHT, *SOME_THOUGHT),
            "not_written": ("thought inside the content", "thoughts inside, several turns"),
        },
    ),
    "Nemotron 3: think tags in every turn, white space trimmed": made(
        TOOLS
        + LAST_USER
        + """{% set enable_thinking = enable_thinking if enable_thinking is defined else True %}
        {% for m in messages %}{% if m.role == 'assistant' %}
        {% if m.reasoning_content %}{% set text = '<think>\\n' + m.reasoning_content + '\\n</think>\\n' + m.content %}
        {% elif '<think>' in m.content %}{% set text = m.content %}
        {% else %}{% set text = '<think></think>' + m.content %}{% endif %}
        {% if loop.index0 < ns.last %}{% set text = '<think></think>' + text.split('</think>')[-1] %}{% endif %}
        {{ '<|im_start|>assistant\\n' + text | trim }}
        {% for c in m.tool_calls or [] %}{{ '\\n<tool_call>\\n<function=' + c.function.name + '>\\n' }}
        {{ c.function.arguments | tojson + '\\n</function>\\n</tool_call>\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}"""
        + OTHERS
        + """{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
        {{ '<think>\\n' if enable_thinking else '<think></think>' }}{% endif %}""",
        *IM,
        eos="<|im_end|>",
        **THINK,
        left_out={"no_reasoning": SOME_THOUGHT},
    ),
    "Seed: thoughts in tags of its own": made(
        """{% for m in messages %}{{ bos_token + m.role + '\\n' }}
        {% if m.role == 'assistant' and m.reasoning_content %}
        {{ '<seed:think>' + m.reasoning_content + '</seed:think>' }}{% endif %}{{ m.content }}
        {% for c in m.tool_calls or [] %}{{ '<seed:tool_call>' + c.function | tojson }}{% endfor %}{{ eos_token }}
        {% endfor %}{% if add_generation_prompt %}{{ bos_token + 'assistant\\n' }}{% endif %}""",
        *("<seed:bos>",),
        eos="<seed:eos>",
        bos="<seed:bos>",
    ),
    "white space after a result goes once an answer follows": made(
        """{% for m in messages %}
        {% if m.role == 'tool' %}
        {{ '<|im_start|>tool\\n' + m.content + ('\\n\\n' if loop.last else '') + '<|im_end|>\\n' }}
        {% elif m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' + m.content }}"""
        + CALLS
        + "{{ '<|im_end|>\\n' }}"
        + OTHERS
        + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        *IM,
        eos="<|im_end|>",
        left_out={"not_written": APART},
    ),
    "an empty thought before every answer, even before one inside the content": made(
        """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
        {% if m.role == 'assistant' %}{{ '<think></think>' }}{% endif %}{{ m.content }}"""
        + CALLS
        + """{{ '<|im_end|>\\n' }}{% endfor %}
        {% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
        *IM,
        eos="<|im_end|>",
        left_out={"not_written": (*APART, *INSIDE)},
    ),
    "answers in a row share a turn": made(
        """{% for m in messages %}
        {% if loop.first or m.role != 'assistant' or messages[loop.index0 - 1].role != 'assistant' %}
        {{ '<|im_start|>' + m.role + '\\n' }}{% endif %}{{ m.content }}"""
        + CALLS
        + """{% if loop.last or m.role != 'assistant' or messages[loop.index0 + 1].role != 'assistant' %}
        {{ '<|im_end|>\\n' }}{% endif %}{% endfor %}
        {% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
        *IM,
        eos="<|im_end|>",
        left_out={"not_written": APART},
    ),
    "the prompt begins an answer that turns do not hold": made(
        """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"""
        + CALLS
        + """{{ '<|im_end|>\\n' }}{% endfor %}
        {% if messages[-1].role != 'assistant' %}{{ '<|im_start|>assistant\\nHere are my steps:\\n' }}{% endif %}""",
        *IM,
        eos="<|im_end|>",
        left_out={"not_continued": (*NO_THOUGHT, *APART, *INSIDE)},
    ),
    "vision: text as a list of parts": made(
        """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
        {% if m.content is string %}{{ raise_exception('content is a list of parts') }}{% endif %}
        {% for part in m.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}"""
        + CALLS
        + """{{ '<|im_end|>\\n' }}{% endfor %}
        {% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
        *IM,
        eos="<|im_end|>",
        left_out={"not_written": APART},
    ),
}
"""What a template does → a small one that does it."""
