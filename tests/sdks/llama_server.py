"""llama.cpp's server on a model with random weights, which is written first: `llama_server.py DIRECTORY PORT`.

The model speaks characters of ASCII and a few others, in no order that means anything, but always the same ones after
the same text. Runs in an environment of its own, with nothing of Breakwater in it.
"""

import signal
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp

ALIAS = "tiny"
CONTEXT = 4096
"""Tokens that a request and its answer may have together."""
SLOTS = 4
BATCH = 512
"""Tokens that a text to embed may have."""
CHARACTERS = ["Ċ", "Ġ", *map(chr, range(33, 127))]
"""As byte-level vocabularies write them: `Ċ` is the end of a line, `Ġ` a blank."""
END_OF_THOUGHT = "</think>"
OTHERS = ["é", "船", "🚢", "<tool_call>", "</tool_call>", "<think>", END_OF_THOUGHT]
MARKS = ["<|im_start|>", "<|im_end|>"]
TOKENS = [*CHARACTERS, *OTHERS, *MARKS]
BEGIN, END = map(TOKENS.index, MARKS)
CALL = TOKENS.index("<tool_call>")
TEMPLATE = """\
{%- if tools %}<|im_start|>system
You may call these functions:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
To call one, write <tool_call>{"name": NAME, "arguments": {...}}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{%- if message.reasoning_content %}
<think>
{{ message.reasoning_content }}
</think>
{%- endif %}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if reasoning_effort %}<think>
{% endif %}{% endif %}"""
LAYERS, HEADS, WIDTH, INNER = 2, 4, 64, 128


def write_model(path: Path) -> None:
    """Writes a model of Llama's architecture: half a megabyte."""
    random = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(ALIAS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    kinds = {
        **dict.fromkeys(CHARACTERS, gguf.TokenType.NORMAL),
        **dict.fromkeys(OTHERS, gguf.TokenType.USER_DEFINED),
        **dict.fromkeys(MARKS, gguf.TokenType.CONTROL),
    }
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([kinds[token] for token in TOKENS])
    writer.add_token_merges(["f e"])  # llama.cpp wants one; there is no such token, so none is made
    writer.add_bos_token_id(BEGIN)
    writer.add_eos_token_id(END)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)

    def add(name: str, *shape: int, scale: Any = 1.0) -> None:
        weights = random.standard_normal(shape) * scale / np.sqrt(shape[-1])
        writer.add_tensor(f"{name}.weight", weights.astype(np.float32))

    def add_norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))

    add("token_embd", len(TOKENS), WIDTH, scale=8)
    for layer in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            add_norm(f"blk.{layer}.{name}")
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}", WIDTH, WIDTH)
        for name, rows, columns in (("gate", INNER, WIDTH), ("up", INNER, WIDTH), ("down", WIDTH, INNER)):
            add(f"blk.{layer}.ffn_{name}", rows, columns)
    add_norm("output_norm")
    scales = np.full((len(TOKENS), 1), 4.0)  # far apart, so that no rounding decides between two tokens
    scales[TOKENS.index(END_OF_THOUGHT)] *= 2  # or no thought would come to an end
    add("output", len(TOKENS), WIDTH, scale=scales)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def serve(model: Path, port: int) -> None:
    """Serves chats and embeddings until it is killed."""
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.model_alias = {ALIAS}
    params.port = port
    params.n_ctx = CONTEXT * SLOTS
    params.n_parallel = SLOTS
    params.cpuparams.n_threads = 1
    params.use_jinja = True
    params.reasoning_format = xllamacpp.common_reasoning_format.COMMON_REASONING_FORMAT_DEEPSEEK
    params.embedding = True
    params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    params.cache_prompt = False  # the same text after the same prompt, whatever came before
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    model = Path(sys.argv[1]) / "tiny.gguf"
    if not model.exists():
        write_model(model)
    serve(model, int(sys.argv[2]))
