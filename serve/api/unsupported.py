"""Fields that clients of other servers send and this one does not do.

Each is refused by name unless its value asks for nothing. A field that is in no table at all is ignored, as
OpenAI-compatible servers do. It does not know the fields that act.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve.api.errors import invalid

# field -> values that ask for nothing (null always does). Equality is by JSON value, so 1 and True differ.
_BOTH: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "json_schema": (),
    "regex": ("",),
    "ebnf": ("",),
    "grammar": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "allowed_token_ids": ([],),
    "logprob_token_ids": ([],),
    "prompt_token_ids": ([],),
    "input_ids": ([],),
    "bad_words": ([],),
    "logits_processors": ([],),
    "return_tokens_as_token_ids": (False,),
    "return_hidden_states": (False,),
    "priority": (0,),
    "lora_path": (),
    "kv_transfer_params": (),
    "custom_logit_processor": (),
    "typical_p": (1, 1.0),
    "top_a": (0, 0.0),
    "tfs_z": (1, 1.0),
    "mirostat": (0,),
    "dynatemp_range": (0, 0.0),
    "xtc_probability": (0, 0.0),
    "dry_multiplier": (0, 0.0),
    "repeat_penalty": (1, 1.0),
    "mirostat_mode": (0,),
    # Other names for a length or an end: without them an answer would fill the context.
    "max_new_tokens": (),
    "max_output_tokens": (),
    "max_length": (),
    "n_predict": (-1,),
    "num_predict": (-1,),
    "stop_sequences": ([],),
    "stopping_strings": ([],),
    "stop_regex": ([], ""),
    "no_stop_trim": (False,),
    "repetition_detection": (),
    "min_new_tokens": (0,),
    "top_n_sigma": (-1, -1.0, 0, 0.0),
    "n_probs": (0,),
    "num_beams": (1,),
    "no_repeat_ngram_size": (0,),
    "detokenize": (True,),
    "vllm_xargs": ({},),
}
_CHAT: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "reasoning": (),
    "verbosity": (),
    "web_search_options": (),
    "chat_template": (),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "prompt": (),
}
_COMPLETION: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "prompt_embeds": (),
    "messages": (),
    "top_logprobs": (0,),
    "tools": ([],),
    "functions": ([],),
}


def _same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and bool(left == right)


def _refuse(body: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]], route: str) -> None:
    for name, inert in table.items():
        value = body.get(name)
        if value is None or any(_same(value, harmless) for harmless in inert):
            continue
        raise invalid(name, f"not supported by this server{route}", "unsupported_parameter")


def refuse_unsupported_chat(body: Mapping[str, Any]) -> None:
    """ApiError 400 for the first field of a chat body that asks for something this server does not do."""
    _refuse(body, _BOTH, "")
    _refuse(body, _CHAT, " in chat completions")


def refuse_unsupported_completion(body: Mapping[str, Any]) -> None:
    """The same for a completions body."""
    _refuse(body, _BOTH, "")
    _refuse(body, _COMPLETION, " in completions")
