"""What in a submission's Python would sink a graded run: code that does not parse, engines that are not allowed.

Read from the syntax tree, nothing is imported. Standard library only; knows no archives.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

ENGINES = frozenset(
    (
        *("aphrodite", "ctransformers", "ctranslate2", "deepspeed", "exllama", "exllamav2", "exllamav3"),
        *("fastertransformer", "ktransformers", "lightllm", "llama_cpp", "lmdeploy", "mii", "minisgl", "mlc_llm"),
        *("nanovllm", "onnxruntime_genai", "openvino_genai", "powerinfer", "sglang", "tensorrt_llm"),
        *("text_generation", "text_generation_server", "tgis", "tokasaurus", "tritonserver", "vllm"),
        *("vllm_flash_attn", "xinference"),
    )
)
OLDEST = (3, 10)
_BY_NAME = ("import_module", "__import__", "find_spec", "run_module")


def python_faults(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, fault name, message) of one file."""
    try:
        tree = ast.parse(text, feature_version=OLDEST)
    except (SyntaxError, ValueError) as error:
        line = error.lineno if isinstance(error, SyntaxError) else 0
        yield line or 0, "broken python", f"does not parse on Python {OLDEST[0]}.{OLDEST[1]}: {error}"
        return
    for node in ast.walk(tree):
        for name in _imported(node):
            if name.partition(".")[0] in ENGINES:
                yield (
                    getattr(node, "lineno", 0),
                    "forbidden engine",
                    f"imports {name}: existing engines are not allowed",
                )


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return [node.module]
    if isinstance(node, ast.Call) and node.args:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        first = node.args[0]
        if called in _BY_NAME and isinstance(first, ast.Constant) and isinstance(first.value, str):
            return [first.value]
    return []
