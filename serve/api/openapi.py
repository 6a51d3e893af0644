"""Request schemas for /openapi.json: bodies are parsed by hand, so the document is told what they hold."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


def body_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """``openapi_extra`` of a route whose JSON body is a ``kind``."""
    schema = kind.model_json_schema()
    definitions = schema.pop("$defs", {})
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": _inline(schema, definitions)}}}
    }


def _inline(node: Any, definitions: dict[str, Any]) -> Any:
    """Replace references by what they name: the schemas are small, not recursive, and used once."""
    if isinstance(node, dict):
        reference = node.get("$ref")
        if isinstance(reference, str):
            return _inline(definitions[reference.rsplit("/", 1)[1]], definitions)
        return {key: _inline(value, definitions) for key, value in node.items()}
    if isinstance(node, list):
        return [_inline(item, definitions) for item in node]
    return node
