"""Chat templates with the tokens of well-known families, cut down to what matters for tools."""

import copy
from dataclasses import dataclass

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

_TURN = "{{- '<|im_start|>' + m.role + '\\n' -}}"
_PROMPT = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
# SmolLM2 and the like: nothing of tools.
PLAIN = (
    "{%- for m in messages -%}"
    + _TURN
    + "{{- m.content + '<|im_end|>\\n' -}}{%- endfor -%}"
    + _PROMPT
)
# Hermes and Qwen2.5: tools in the system message, results in messages of the user.
HERMES = (
    "{%- if tools -%}{{- '<|im_start|>system\\n<tools>' -}}"
    "{%- for tool in tools -%}{{- '\\n' + tool | tojson -}}{%- endfor -%}"
    "{{- '\\n</tools><|im_end|>\\n' -}}{%- endif -%}"
    "{%- for m in messages -%}{%- if m.role == 'tool' -%}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + m.content -}}"
    "{{- '\\n</tool_response><|im_end|>\\n' -}}"
    "{%- else -%}" + _TURN + "{{- m.content -}}{%- for call in m.tool_calls or [] -%}"
    '{{- \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' -}}'
    "{{- (call.function.arguments | tojson) + '}\\n</tool_call>' -}}{%- endfor -%}"
    "{{- '<|im_end|>\\n' -}}{%- endif -%}{%- endfor -%}" + _PROMPT
)
# Qwen3-Coder: another format between the same marks.
XML = HERMES.replace(
    '{"name": "\' + call.function.name + \'", "arguments": \'',
    "<function=' + call.function.name + '>'",
).replace("'}\\n</tool_call>'", "'</function>\\n</tool_call>'")
# Llama 3.1 and 3.2: one call an answer, the result has a role of its own.
LLAMA3 = (
    "{%- set bar = '<|eot_id|>' -%}{{- '<|begin_of_text|>' -}}"
    "{%- if tools -%}{{- '<|start_header_id|>system<|end_header_id|>\\n\\nFunctions:' -}}"
    "{%- for tool in tools -%}{{- '\\n' + tool | tojson -}}{%- endfor -%}{{- bar -}}{%- endif -%}"
    "{%- for m in messages -%}{%- if m.tool_calls -%}"
    "{%- if m.tool_calls | length != 1 -%}{{- raise_exception('one call at once') -}}{%- endif -%}"
    "{%- set call = m.tool_calls[0].function -%}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}"
    '{{- \'{"name": "\' + call.name + \'", "parameters": \' -}}'
    "{{- (call.arguments | tojson) + '}' + bar -}}"
    "{%- else -%}{%- set role = 'ipython' if m.role == 'tool' else m.role -%}"
    "{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + m.content + bar -}}"
    "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"
)


def _mistral(calls: str, lead: str = "") -> str:
    """Turns of instructions and answers, which must alternate; calls have ids of nine letters."""
    return (
        "{%- if tools -%}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' -}}"
        "{%- endif -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
        "{{- '[INST]' + m.content + '[/INST]' -}}{%- elif m.role == 'system' -%}"
        "{{- '[INST]' + m.content + '\\n[/INST]' -}}{%- elif m.role == 'tool' -%}"
        "{%- if m.tool_call_id | length != 9 -%}{{- raise_exception('id') -}}{%- endif -%}"
        "{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' -}}{%- elif m.tool_calls -%}"
        "{%- for call in m.tool_calls -%}{%- if call.id | length != 9 -%}"
        "{{- raise_exception('id') -}}{%- endif -%}{%- endfor -%}"
        + calls
        + "{{- '</s>' -}}{%- else -%}{{- '"
        + lead
        + "' + m.content + '</s>' -}}{%- endif -%}{%- endfor -%}"
    )


_LIST = (
    "{%- for call in m.tool_calls -%}{{- '[TOOL_CALLS]OPEN[' if loop.first else ', ' -}}"
    "{{- (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' -}}{%- endfor -%}"
    "{{- ']' -}}"
)
MISTRAL_V3 = _mistral(_LIST.replace("OPEN", " "))
MISTRAL_V7 = _mistral(_LIST.replace("OPEN", ""))
MISTRAL_V11 = _mistral(
    "{%- for call in m.tool_calls -%}{{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' -}}"
    "{{- call.id + '[ARGS]' + call.function.arguments | tojson -}}{%- endfor -%}"
)
# Gemma and older Mistral models: no system message.
NO_SYSTEM = (
    "{%- if messages[0].role == 'system' -%}{{- raise_exception('no system') -}}{%- endif -%}"
    + PLAIN
)
# Qwen3: the model opens its thoughts; without thinking the template writes empty ones.
QWEN3 = (
    HERMES
    + "{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking -%}"
    "{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}"
)
# DeepSeek-R1 and Qwen3-Thinking: the template opens them.
DEEPSEEK_R1 = HERMES + "{%- if add_generation_prompt -%}{{- '<think>\\n' -}}{%- endif -%}"


@dataclass(frozen=True)
class Family:
    """A template, and tokens besides those of the tiny model: special ones, and those of text."""

    template: str
    special: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()


_TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_MISTRAL = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]")
_RESULTS = ("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>")
FAMILIES = {
    "plain": Family(PLAIN),
    "no-system": Family(NO_SYSTEM),
    "hermes": Family(HERMES),  # its marks are words
    "qwen2.5": Family(HERMES, tags=_TAGS[:2]),
    "qwen3": Family(QWEN3, tags=_TAGS),
    "deepseek-r1": Family(DEEPSEEK_R1, tags=_TAGS),
    "xml": Family(XML, tags=_TAGS[:2]),
    "llama3": Family(LLAMA3, (*_LLAMA, "<|python_tag|>")),
    "mistral-v3": Family(MISTRAL_V3, (*_MISTRAL, *_RESULTS)),
    "mistral-v7": Family(MISTRAL_V7, (*_MISTRAL, *_RESULTS)),
    "mistral-v11": Family(MISTRAL_V11, (*_MISTRAL, *_RESULTS, "[CALL_ID]", "[ARGS]")),
}


def of_family(tokenizer: PreTrainedTokenizerBase, name: str) -> PreTrainedTokenizerBase:
    """A copy of the tokenizer with the template and the tokens of a family."""
    family = FAMILIES[name]
    made = copy.deepcopy(tokenizer)
    made.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in family.tags])
    special = [AddedToken(token, special=True, normalized=False) for token in family.special]
    made.add_tokens(special, special_tokens=True)
    made.chat_template = family.template
    return made
