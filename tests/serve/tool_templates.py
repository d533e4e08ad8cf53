"""Chat templates with tools, as short as the formats allow."""

from __future__ import annotations

HERMES = """\
{%- if tools %}{{- '<|im_start|>system\n' }}
{%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}
{{- '<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call><|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'tool' %}{{- '<tool_response>' + message.content + '</tool_response>' }}
{%- else %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

_MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and loop.index0 == 0 %}{{- '[AVAILABLE_TOOLS]' + tools | tojson }}{%- endif %}
{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}{{- raise_exception('ids have 9 letters') }}{%- endif %}
{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}CALLS
{{- eos_token }}
{%- else %}{{- message.content + eos_token }}{%- endif %}
{%- endfor %}"""
MISTRAL = _MISTRAL.replace(
    "CALLS",
    """{{- '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
{{- ']' if loop.last else ', ' }}
{%- endfor %}""",
)
MISTRAL_NAMED = _MISTRAL.replace(
    "CALLS",
    """
{%- for call in message.tool_calls %}
{{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id }}
{{- '[ARGS]' + call.function.arguments | tojson }}
{%- endfor %}""",
)

LLAMA = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start|>' + message.role + '<|end|>' }}
{%- if tools and loop.index0 == 0 %}{{- tools | tojson(indent=4) }}{%- endif %}
{%- if 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at once') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
{%- else %}
{{- message.content }}
{%- endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>' }}{%- endif %}"""

TEMPLATES = {
    "hermes": HERMES,
    "mistral": MISTRAL,
    "mistral, named": MISTRAL_NAMED,
    "llama": LLAMA,
}
